package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

func cmdDown(args []string) error {
	set, name := flagSet("down")
	purge := set.Bool("purge", false, "")
	words, rest, err := parse(set, args)
	if err != nil {
		return err
	}
	if err := noWords(set, words, rest); err != nil {
		return err
	}
	c, err := openCluster(*name)
	if err != nil {
		return err
	}
	if err := checkMachine(); err != nil {
		return err
	}
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if err := c.down(); err != nil {
		return err
	}
	if *purge {
		return c.purge()
	}
	return nil
}

// down powers the cluster off, as if the machines were switched off: pods are not asked to leave, and what the API server
// knows stays in etcd. It takes any state a crash may have left, and does what is still to do.
func (c *cluster) down() error {
	// A damaged settings file must not keep processes alive: the records tell what runs.
	if _, err := c.load(); err != nil {
		say("%v", err)
	}
	for _, key := range c.recordKeys() {
		if holder, err := c.recorded(key); err == nil && strings.HasPrefix(key, "namespaces") {
			if (namespaces{holder}).sameAsOwn() {
				return fmt.Errorf("`down` runs inside the cluster it would remove: call it outside `kerf-cluster exec`")
			}
		}
	}
	begun := isUp(c.dir)
	// In this order nobody notices the end of another and starts something new: first who starts containers, then the
	// containers themselves, then who watches them.
	steps := []func() error{
		func() error { return c.endRecorded("kubelet", "kube-proxy") },
		func() error { return c.removeCgroup("") },
		func() error { return c.endRecorded("containerd") },
		func() error { return c.endShims("") },
		func() error { return c.removeCgroup("") }, // what a shim may have started in between
		func() error { return c.endRecorded("kube-scheduler", "kube-controller-manager", "kube-apiserver") },
		func() error { return c.endRecorded("etcd") },
		c.reportStrangers,
		func() error { return c.endRecorded("namespaces") },
		func() error { return leaveMachine(c) },
	}
	var failures []error
	for _, step := range steps {
		failures = append(failures, step()) // one failure does not keep the rest from being cleaned
	}
	if err := errors.Join(failures...); err != nil {
		return err
	}
	if begun {
		say("cluster %s is down", c.name)
	}
	return os.RemoveAll(c.path("run"))
}

// recordKeys are the keys of all recorded processes.
func (c *cluster) recordKeys() []string {
	files, _ := filepath.Glob(c.recordPath("*")) // the pattern is well-formed, and nothing else can fail
	var keys []string
	for _, file := range files {
		keys = append(keys, strings.TrimSuffix(filepath.Base(file), ".json"))
	}
	return keys
}

// endRecorded ends the recorded processes of these names, on all nodes, at the same time.
func (c *cluster) endRecorded(names ...string) error {
	var mutex sync.Mutex
	var failures []error
	var group sync.WaitGroup
	for _, key := range c.recordKeys() {
		if name, _, _ := strings.Cut(key, "@"); !slices.Contains(names, name) {
			continue
		}
		group.Go(func() {
			running, err := c.recorded(key)
			if err == nil {
				err = running.end(stopPatience)
			}
			if err != nil {
				mutex.Lock()
				defer mutex.Unlock()
				failures = append(failures, fmt.Errorf("cannot end %s: %w", key, err))
			}
		})
	}
	group.Wait()
	return errors.Join(failures...)
}

// endShims ends the shims that containerd leaves behind, of one node or of all: the processes that carry the address of one
// of this cluster's containerds in their arguments.
func (c *cluster) endShims(node string) error {
	for _, pid := range processIDs() {
		p, err := recordOf(pid)
		address := c.shimAddress(commandLine(pid))
		if err != nil || address == "" || (node != "" && address != c.containerdSocket(node)) {
			continue
		}
		if err := p.kill(); err != nil {
			return err
		}
	}
	return nil
}

// shimAddress is the address of the containerd whose shim has this command line; empty for anything but a shim of this
// cluster.
func (c *cluster) shimAddress(line []string) string {
	if len(line) == 0 || filepath.Base(line[0]) != "containerd-shim-runc-v2" {
		return ""
	}
	for i, arg := range line[:len(line)-1] {
		address := line[i+1]
		if arg == "-address" && filepath.Base(address) == "containerd.sock" && filepath.Dir(filepath.Dir(address)) == c.dir {
			return address
		}
	}
	return ""
}

// reportStrangers names processes that others started in the cluster's namespaces. They are not the tool's to end, and the
// namespaces live as long as they do.
func (c *cluster) reportStrangers() error {
	ours := map[string]bool{}
	for _, key := range c.recordKeys() {
		if holder, err := c.recorded(key); err == nil && strings.HasPrefix(key, "namespaces") && holder.alive() {
			if link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", holder.PID)); err == nil {
				ours[link] = true
			}
		}
	}
	for _, pid := range processIDs() {
		link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
		if err != nil || !ours[link] || c.isRecorded(pid) {
			continue
		}
		say("process %d (%s) still runs in the cluster's namespaces: end it, so that they can go", pid, strings.Join(commandLine(pid), " "))
	}
	return nil
}

func (c *cluster) isRecorded(pid int) bool {
	for _, key := range c.recordKeys() {
		if p, err := c.recorded(key); err == nil && p.PID == pid {
			return true
		}
	}
	return false
}

// processIDs are all processes of the machine.
func processIDs() []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// commandLine is a process's arguments; none when it is gone.
func commandLine(pid int) []string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || len(text) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(text), "\x00"), "\x00")
}

// purge removes the state folder, which must be one that the tool made, and what is empty around it then.
func (c *cluster) purge() error {
	if _, err := os.Lstat(c.dir); os.IsNotExist(err) {
		return c.removeLock()
	}
	for _, known := range []string{"cluster.json", "log"} {
		if _, err := os.Lstat(c.path(known)); err == nil {
			if err := os.RemoveAll(c.dir); err != nil {
				return fmt.Errorf("cannot remove the state folder: %w", err)
			}
			return c.removeLock()
		}
	}
	return fmt.Errorf("%s does not look like a cluster's state folder: remove it by hand if it is one", c.dir)
}

// removeLock removes the lock, which is held, and the folder of all clusters if this was the last.
func (c *cluster) removeLock() error {
	if err := os.Remove(c.lockPath()); err != nil {
		return err
	}
	_ = os.Remove(filepath.Dir(c.dir)) // fails while there are others, which is meant
	return nil
}
