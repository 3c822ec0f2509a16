package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// namespaces are a network and a mount namespace, kept by a process that only sleeps (the holder), so that they outlive
// every component in them. One pair belongs to the control plane, and one to every node.
type namespaces struct {
	holder process
}

// holderKey names the record of a holder: the control plane's for an empty node.
func holderKey(node string) string { return componentKey("namespaces", node) }

// enter finds the namespaces of the control plane (no node) or of a node.
func (c *cluster) enter(node string) (namespaces, error) {
	holder, err := c.recorded(holderKey(node))
	if err != nil {
		return namespaces{}, err
	}
	if !holder.alive() {
		return namespaces{}, fmt.Errorf("cluster %q is not up: run `kerf-cluster up`", c.name)
	}
	return namespaces{holder}, nil
}

// makeNamespaces starts a holder. Its mounts begin as a private copy of the machine's and are shared from there on, so
// that nothing mounted inside reaches the machine, and containers can get mounts passed on.
func (c *cluster) makeNamespaces(node string) (namespaces, error) {
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		return namespaces{}, err
	}
	command := exec.Command(sleep, "infinity")
	command.Dir = "/"
	command.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET}
	holder, err := c.launch(holderKey(node), command)
	if err != nil {
		return namespaces{}, err
	}
	inside := namespaces{holder}
	return inside, inside.run("mount", "--no-mtab", "--make-rshared", "/")
}

// nsenterArgs is the command line that runs args inside. nsenter becomes the command: the process id stays.
func (n namespaces) nsenterArgs(args ...string) []string {
	return append([]string{"nsenter", fmt.Sprintf("--target=%d", n.holder.PID), "--mount", "--net", "--"}, args...)
}

// command prepares a command inside.
func (n namespaces) command(args ...string) *exec.Cmd {
	line := n.nsenterArgs(args...)
	return exec.Command(line[0], line[1:]...)
}

// run runs a command inside to its end.
func (n namespaces) run(args ...string) error { return n.runWith(nil, args...) }

// runWith runs a command inside that reads a text.
func (n namespaces) runWith(input io.Reader, args ...string) error {
	command := n.command(args...)
	command.Stdin = input
	output, err := command.CombinedOutput()
	if err != nil {
		return fmt.Errorf("`%s` failed in the cluster's namespaces: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(output)))
	}
	return nil
}

// bind mounts source over target inside.
func (n namespaces) bind(source, target string) error {
	return n.run("mount", "--no-mtab", "--bind", source, target)
}

// sameAsOwn reports whether the tool itself runs in these namespaces, as it does below `kerf-cluster exec`.
func (n namespaces) sameAsOwn() bool {
	own, err1 := os.Readlink("/proc/self/ns/mnt")
	theirs, err2 := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", n.holder.PID))
	return err1 == nil && err2 == nil && own == theirs
}
