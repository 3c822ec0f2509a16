package main

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

const (
	// pauseImage is the sandbox of every pod.
	pauseImage = "localhost/kerf-pause:1"
	// testImage has a shell, and the C library's loader and libraries, so that dynamically linked programs that are
	// mounted into its containers run; and ldconfig, to look into the loader's cache, of which the image has none.
	testImage = "localhost/kerf-e2e:1"
)

// showAndWait is what a container of the test image does that is given no command: it shows its GPUs, and lives until it is
// told to end.
const showAndWait = "trap 'exit 0' TERM; nvidia-smi -L; sleep 1000000 & wait"

// loaders are the fixed paths at which dynamically linked programs look for the loader.
var loaders = map[string]string{"amd64": "/lib64/ld-linux-x86-64.so.2", "arm64": "/lib/ld-linux-aarch64.so.1"}

// testLibraries are what programs written in C or Rust need beside the loader.
var testLibraries = []string{"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"}

// writeTestImages makes the two images and returns their archives.
func (c *cluster) writeTestImages(built programs) ([]string, error) {
	pause, err := hostFile("/pause", filepath.Join(built.pause, "pause"))
	if err != nil {
		return nil, err
	}
	entries, err := testImageEntries()
	if err != nil {
		return nil, err
	}
	images := []image{
		{reference: pauseImage, entrypoint: []string{"/pause"}, entries: []entry{pause}},
		{reference: testImage, entrypoint: []string{"/bin/sh", "-c", showAndWait}, entries: entries},
	}
	var archives []string
	for _, i := range images {
		name, _, _ := strings.Cut(path.Base(i.reference), ":")
		archive := c.path("images", name+".tar")
		if err := i.write(archive); err != nil {
			return nil, fmt.Errorf("cannot make image %s: %w", i.reference, err)
		}
		archives = append(archives, archive)
	}
	return archives, nil
}

// testImageEntries are busybox under all its names, the C library, and the few files that programs expect. Debian 12's
// static busybox crashes whenever it resolves a name or address for wget; nc and httpd work.
func testImageEntries() ([]entry, error) {
	program, err := exec.LookPath("busybox")
	if err != nil {
		return nil, err
	}
	busybox, err := hostFile("/bin/busybox", program)
	if err != nil {
		return nil, err
	}
	entries := []entry{
		{path: "/tmp", mode: 0o777 | os.ModeSticky},
		{path: "/root", mode: 0o700},
		{path: "/etc/passwd", mode: 0o644, content: []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")},
		{path: "/etc/group", mode: 0o644, content: []byte("root:x:0:\nnogroup:x:65534:\n")},
		busybox,
	}
	names, err := exec.Command(program, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("`busybox --list` failed: %w", err)
	}
	for _, name := range strings.Fields(string(names)) {
		if name != "busybox" {
			entries = append(entries, entry{path: "/bin/" + name, target: "busybox"})
		}
	}
	ldconfig, err := hostFile("/sbin/ldconfig", ldconfigProgram())
	if err != nil {
		return nil, err
	}
	entries = append(entries, ldconfig)
	loader, known := loaders[runtime.GOARCH]
	if !known {
		return nil, fmt.Errorf("the test image is not made for %s: add its loader to testimages.go", runtime.GOARCH)
	}
	libraries := append([]string{path.Base(loader)}, testLibraries...)
	for _, name := range libraries {
		onHost, err := resolveLibrary(name)
		if err != nil {
			return nil, err
		}
		inImage := "/lib/" + multiarch[runtime.GOARCH] + "/" + name
		if name == path.Base(loader) {
			inImage = loader
		}
		library, err := hostFile(inImage, onHost)
		if err != nil {
			return nil, err
		}
		entries = append(entries, library)
	}
	return entries, nil
}

// ldconfigProgram is where this machine has ldconfig; on Ubuntu /sbin/ldconfig is a shell script around it.
func ldconfigProgram() string {
	const program = "/sbin/ldconfig"
	if _, err := os.Stat(program + ".real"); err == nil {
		return program + ".real"
	}
	return program
}

// multiarch is the name of the folder that Debian's loader searches.
var multiarch = map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}

// sortedKeys are the keys of a map in order.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
