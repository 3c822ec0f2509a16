package main

import (
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// debianPrograms are the programs that come from the distribution, and the packages that bring them.
var debianPrograms = []struct{ program, pkg string }{
	{"ip", "iproute2"},
	{"mount", "mount"},
	{"nsenter", "util-linux"},
	{"runc", "runc"},
	{"nft", "nftables"},
	{"busybox", "busybox-static"},
}

// systemPath is searched for programs beside the caller's PATH: an unprivileged PATH often lacks the sbin folders.
const systemPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// checkMachine reports everything that is missing to run a cluster, in one error.
func checkMachine() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("must be root: a cluster needs namespaces, mounts and cgroups")
	}
	if err := os.Setenv("PATH", os.Getenv("PATH")+":"+systemPath); err != nil {
		return err
	}
	var programs, packages []string
	for _, needed := range debianPrograms {
		path, err := exec.LookPath(needed.program)
		if err == nil && (needed.program != "busybox" || isStatic(path)) {
			continue
		}
		programs, packages = append(programs, needed.program), append(packages, needed.pkg)
	}
	if len(programs) > 0 {
		return fmt.Errorf("not installed: %s; run `apt-get install -y %s`", strings.Join(programs, ", "), strings.Join(packages, " "))
	}
	return nil
}

// isStatic reports whether a program needs no dynamic loader; the busybox of the test image has to run beside any C library.
func isStatic(path string) bool {
	file, err := elf.Open(path)
	if err != nil {
		return false
	}
	defer file.Close()
	for _, segment := range file.Progs {
		if segment.Type == elf.PT_INTERP {
			return false
		}
	}
	return true
}
