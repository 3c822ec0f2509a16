package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// cmdPowerOff cuts the power of nodes. The control plane does not notice but for their silence.
func cmdPowerOff(args []string) error {
	set, name := flagSet("power-off")
	words, rest, err := parse(set, args)
	if err != nil {
		return err
	}
	if len(words) > 1 || rest != nil {
		return usageError("power-off takes one node or none, not %q", append(words, rest...))
	}
	c, unlock, err := holdCluster(*name)
	if err != nil {
		return err
	}
	defer unlock()
	nodes, err := c.nodesNamed(strings.Join(words, ""))
	if err != nil {
		return err
	}
	for _, node := range nodes {
		if err := c.powerOff(node); err != nil {
			return fmt.Errorf("cannot switch %s off: %w", node, err)
		}
	}
	return nil
}

// powerOff ends everything that runs on a node, and empties what is memory on a real one: the state of containerd and
// its shims, the CDI folder, and all mounts. Disks stay as they are.
func (c *cluster) powerOff(node string) error {
	inside, err := c.enter(node)
	if err != nil {
		return err
	}
	kill := func(name string) error {
		running, err := c.recorded(componentKey(name, node))
		if err != nil {
			return err
		}
		return running.kill()
	}
	// In the order of `down`, for the same reason.
	err = errors.Join(
		kill("kubelet"), kill("kube-proxy"),
		c.removeCgroup(node),
		kill("containerd"),
		c.endShims(node),
		c.removeCgroup(node), // what a shim may have started in between
		c.makeCgroup(node),
		c.unmountPods(node, inside),
	)
	if err != nil {
		return err
	}
	for _, dir := range []string{c.path(node, "containerd", "state"), c.path(node, "run-containerd"), c.cdiRoot(node)} {
		if err := empty(dir); err != nil {
			return err
		}
	}
	return nil
}

// unmountPods undoes what kubelet, containerd and its shims have mounted: root file systems, network namespaces, volumes.
func (c *cluster) unmountPods(node string, inside namespaces) error {
	file, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", inside.holder.PID))
	if err != nil {
		return err
	}
	defer file.Close()
	var below []string
	for target, source := range c.nodeMounts(node) {
		below = append(below, target+"/", source+"/")
	}
	below = append(below, c.path(node, "containerd")+"/")
	var points []string
	for scanner := bufio.NewScanner(file); scanner.Scan(); {
		fields := strings.Fields(scanner.Text()) // proc(5): the fifth is the mount point
		if len(fields) > 4 && slices.ContainsFunc(below, func(dir string) bool { return strings.HasPrefix(fields[4], dir) }) {
			points = append(points, fields[4])
		}
	}
	slices.Reverse(points) // what was mounted last goes first
	for _, point := range points {
		// It may have gone with another one: a mount below a bind mount is listed twice.
		_ = inside.run("umount", "--no-mtab", "--lazy", point)
	}
	return nil
}

// empty removes what is in a folder; one that does not exist is empty.
func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, entry := range entries {
		if err := os.RemoveAll(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}
