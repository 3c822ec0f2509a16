package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// machine records what all clusters together change on the machine outside their own folders and namespaces, so that the
// last one to go down can put it back.
type machine struct {
	// Clusters are the state folders of the clusters that are up.
	Clusters []string `json:"clusters"`
	// Folders were made because a mount inside a namespace needs a folder to be mounted on.
	Folders []string `json:"folders"`
	// Sysctls are the values from before the first kubelet, which sets them for the whole machine.
	Sysctls map[string]string `json:"sysctls"`
}

const machineDir = "/run/kerf-e2e"

// kubeletSysctls are what a kubelet sets (pkg/kubelet/cm/container_manager_linux.go, setupKernelTunables).
var kubeletSysctls = []string{
	"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
	"kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
}

// changeMachine reads the record, lets change work on it and writes it back; a record without clusters is removed.
func changeMachine(change func(*machine) error) error {
	unlock, err := lockFile(filepath.Join(machineDir, "lock"), "another kerf-cluster")
	if err != nil {
		return err
	}
	defer unlock()
	path := filepath.Join(machineDir, "machine.json")
	var m machine
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &m)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("cannot read what clusters changed on this machine (%s): %w", path, err)
	}
	changeErr := change(&m)
	if changeErr == nil && len(m.Clusters) == 0 {
		return os.RemoveAll(machineDir)
	}
	text, err = json.MarshalIndent(m, "", "  ") // after a failure too: part of the change may be done
	if err == nil {
		err = writeFile(path, append(text, '\n'), 0o644)
	}
	return errors.Join(changeErr, err)
}

// joinMachine notes that a cluster is coming up, saves the sysctls and makes the folders to mount on.
func joinMachine(c *cluster, folders []string) error {
	return changeMachine(func(m *machine) error {
		if !slices.Contains(m.Clusters, c.dir) {
			m.Clusters = append(m.Clusters, c.dir)
		}
		if m.Sysctls == nil {
			m.Sysctls = map[string]string{}
			for _, name := range kubeletSysctls {
				value, err := os.ReadFile("/proc/sys/" + name)
				if err != nil {
					return fmt.Errorf("cannot save a kernel setting before the kubelet changes it: %w", err)
				}
				m.Sysctls[name] = strings.TrimSpace(string(value))
			}
		}
		for _, folder := range folders {
			made, err := makeFolders(folder)
			m.Folders = append(m.Folders, made...)
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// makeFolders makes a folder and its parents, and returns those that were not there, parents first.
func makeFolders(folder string) ([]string, error) {
	var made []string
	if parent := filepath.Dir(folder); parent != folder {
		var err error
		if made, err = makeFolders(parent); err != nil {
			return made, err
		}
	}
	switch err := os.Mkdir(folder, 0o755); {
	case err == nil:
		return append(made, folder), nil
	case errors.Is(err, fs.ErrExist):
		return made, nil
	default:
		return made, err
	}
}

// leaveMachine notes that a cluster is down. When it was the last one, the sysctls are put back and the folders removed,
// those excepted in which something else has put files meanwhile.
func leaveMachine(c *cluster) error {
	return changeMachine(func(m *machine) error {
		m.Clusters = slices.DeleteFunc(m.Clusters, func(dir string) bool { return dir == c.dir || !isUp(dir) })
		if len(m.Clusters) > 0 {
			return nil
		}
		for name, value := range m.Sysctls {
			if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0); err != nil {
				return fmt.Errorf("cannot put back the kernel setting %s=%s: %w", name, value, err)
			}
		}
		slices.Reverse(m.Folders)
		for _, folder := range m.Folders {
			_ = os.Remove(folder) // fails when it is not empty, which is meant
		}
		return nil
	})
}

// isUp reports whether any process of the cluster with this state folder still runs.
func isUp(dir string) bool {
	c := &cluster{dir: dir}
	records, err := filepath.Glob(c.recordPath("*"))
	if err != nil {
		return false
	}
	for _, path := range records {
		if p, err := c.recorded(strings.TrimSuffix(filepath.Base(path), ".json")); err == nil && p.alive() {
			return true
		}
	}
	return false
}

// mountPoint is one line of /proc/self/mountinfo.
type mountPoint struct {
	path, kind string
}

// mountPoints lists the mounts that the tool sees.
func mountPoints() ([]mountPoint, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var mounts []mountPoint
	for scanner := bufio.NewScanner(file); scanner.Scan(); {
		before, after, found := strings.Cut(scanner.Text(), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if found && len(left) >= 5 && len(right) >= 1 {
			mounts = append(mounts, mountPoint{path: left[4], kind: right[0]})
		}
	}
	return mounts, nil
}
