package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// All containers of a cluster are in cgroups below one that is the cluster's own. That keeps the kubelets of several nodes
// apart (each removes pods' cgroups that it does not know), and tells for certain which processes `down` has to end.

// cgroup is the path of a node's cgroup, or of the cluster's with no node, as a kubelet writes it.
func (c *cluster) cgroup(node string) string {
	return filepath.Join("/kerf-e2e", strings.ReplaceAll(strings.Trim(c.dir, "/"), "/", "+"), node)
}

// hierarchies are the mount points of all cgroup hierarchies: one for each controller in version 1, one in version 2.
func hierarchies() ([]mountPoint, error) {
	mounts, err := mountPoints()
	if err != nil {
		return nil, err
	}
	var found []mountPoint
	for _, mount := range mounts {
		if mount.kind == "cgroup" || mount.kind == "cgroup2" {
			found = append(found, mount)
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no cgroup hierarchy is mounted: containers need one below /sys/fs/cgroup")
	}
	return found, nil
}

// makeCgroup makes a node's cgroup in every hierarchy; the kubelet asks that it exists.
func (c *cluster) makeCgroup(node string) error {
	mounts, err := hierarchies()
	if err != nil {
		return err
	}
	for _, mount := range mounts {
		dir := mount.path
		for _, part := range strings.Split(strings.Trim(c.cgroup(node), "/"), "/") {
			parent := dir
			dir = filepath.Join(dir, part)
			if mount.kind == "cgroup2" {
				passControllers(parent)
			}
			if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("cannot make a cgroup: %w", err)
			}
			if err := inheritCPUs(parent, dir); err != nil {
				return err
			}
			if err := weigh(dir, runtime.NumCPU()); err != nil {
				return err
			}
		}
	}
	return nil
}

// passControllers hands the controllers of a version 2 cgroup on to its children. One that can't be handed on is left
// out: the kubelet says which it misses.
func passControllers(dir string) {
	names, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return
	}
	for _, name := range strings.Fields(string(names)) {
		_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+name), 0)
	}
}

// inheritCPUs fills a new cgroup of the version 1 cpuset controller, which starts without any CPU or memory node.
func inheritCPUs(parent, dir string) error {
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) || (err == nil && strings.TrimSpace(string(value)) != "") {
			continue
		}
		if value, err = os.ReadFile(filepath.Join(parent, name)); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), value, 0); err != nil {
			return fmt.Errorf("cannot fill a cpuset cgroup: %w", err)
		}
	}
	return nil
}

// weigh gives a cgroup the weight that a kubelet gives its pods' as a whole at the top of a machine: 1024 shares a CPU
// (k8s.io/kubernetes/pkg/kubelet/cm). A cgroup on the way to it that weighed less would take from all pods together what
// they have on a real node: with its default they would be worth one process of the control plane.
func weigh(dir string, cpus int) error {
	shares := 1024 * cpus
	// In version 2 as runc translates shares.
	values := map[string]int{"cpu.shares": shares, "cpu.weight": 1 + (shares-2)*9999/262142}
	for name, value := range values {
		file := filepath.Join(dir, name)
		if _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := os.WriteFile(file, []byte(strconv.Itoa(value)), 0); err != nil {
			return fmt.Errorf("cannot weigh a cgroup: %w", err)
		}
	}
	return nil
}

// removeCgroup ends every process in the cgroups of a node, or of the cluster with no node, and removes them.
func (c *cluster) removeCgroup(node string) error {
	mounts, err := hierarchies()
	if err != nil {
		return err
	}
	for _, mount := range mounts {
		dir := filepath.Join(mount.path, c.cgroup(node))
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
			killCgroup(dir)
			if removeTree(dir) {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("cgroup %s can't be removed: a process in it does not end", dir)
			}
		}
		_ = os.Remove(filepath.Dir(dir)) // shared by all clusters: the last one removes it
	}
	return nil
}

// killCgroup sends SIGKILL to every process in a cgroup and below.
func killCgroup(dir string) {
	_ = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.Name() != "cgroup.procs" {
			return nil
		}
		pids, err := os.ReadFile(path)
		if err != nil {
			return nil
		}
		for _, field := range strings.Fields(string(pids)) {
			// 0 is a process outside our view of process ids; as an argument of kill(2) it would mean ourselves.
			if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		return nil
	})
}

// removeTree removes a cgroup with all below it, and reports whether it is gone.
func removeTree(dir string) bool {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	for _, entry := range entries {
		if entry.IsDir() {
			removeTree(filepath.Join(dir, entry.Name()))
		}
	}
	err = syscall.Rmdir(dir)
	return err == nil || errors.Is(err, fs.ErrNotExist)
}
