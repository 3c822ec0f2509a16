package main

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// goVersion is the Go release that everything is built with. It is the lowest that the CNI plugins' module asks for, and
// Kubernetes 1.36 and 1.37 must not be built with Go 1.27: the result serves an OpenAPI document that kubectl refuses.
const goVersion = "1.26.8"

//go:embed _multicall/main.go
var multicallSource string

//go:embed pause/main.go
var pauseSource string

// helmVersion is the release of Helm that installs charts into a cluster. The Makefile reads it here.
const helmVersion = "4.3.2"

// programs are the folders of what a cluster runs, and of Helm.
type programs struct {
	kubernetes, containerd, cni, pause, helm string
}

// kubernetesPrograms are the names that the multi-call program answers to.
var kubernetesPrograms = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"}

func cmdBuild(args []string) error {
	set, _ := flagSet("build")
	kubernetes := set.String("kubernetes", defaultKubernetes, "")
	words, rest, err := parse(set, args)
	if err != nil {
		return err
	}
	if slices.Equal(words, []string{"helm"}) && len(rest) == 0 {
		dir, err := buildHelm()
		if err == nil {
			fmt.Println(dir)
		}
		return err
	}
	if err := noWords(set, words, rest); err != nil {
		return err
	}
	v, err := parseVersion(*kubernetes)
	if err != nil {
		return err
	}
	built, err := build(v)
	if err != nil {
		return err
	}
	for _, dir := range []string{built.kubernetes, built.containerd, built.cni, built.pause, built.helm} {
		fmt.Println(dir)
	}
	return nil
}

// builtPrograms are the folders of what was built before for the cluster's version.
func (c *cluster) builtPrograms() (programs, error) {
	v, err := c.version()
	if err != nil {
		return programs{}, err
	}
	var built programs
	for kind, at := range map[string]struct {
		version string
		dir     *string
	}{
		"kubernetes": {v.String(), &built.kubernetes},
		"containerd": {containerdVersion, &built.containerd},
		"cni":        {cniVersion, &built.cni},
		"pause":      {pauseVersion, &built.pause},
		"helm":       {helmVersion, &built.helm},
	} {
		dir, err := cacheEntry(kind, at.version)
		if err != nil {
			return programs{}, err
		}
		if _, err := os.Stat(filepath.Join(dir, recipeFile)); err != nil {
			return programs{}, fmt.Errorf("%s %s is not built: run `kerf-cluster build --kubernetes %s`", kind, at.version, v)
		}
		*at.dir = dir
	}
	return built, nil
}

// build makes what the cache does not hold yet.
func build(v version) (programs, error) {
	var built programs
	var err error
	if built.pause, err = cached("pause", pauseVersion, pauseSource+goVersion, buildPause); err != nil {
		return programs{}, err
	}
	if built.helm, err = buildHelm(); err != nil {
		return programs{}, err
	}
	if built.cni, err = install("cni", cniVersion, "-s -w", "github.com/containernetworking/plugins",
		"plugins/main/bridge", "plugins/main/loopback", "plugins/ipam/host-local"); err != nil {
		return programs{}, err
	}
	if built.containerd, err = install("containerd", containerdVersion, "-s -w", "github.com/containerd/containerd/v2",
		"cmd/containerd", "cmd/containerd-shim-runc-v2", "cmd/ctr"); err != nil {
		return programs{}, err
	}
	recipe := strings.Join([]string{multicallSource, linkerFlags(v), goVersion}, "\n")
	built.kubernetes, err = cached("kubernetes", v.String(), recipe, func(dir string) error { return buildKubernetes(v, dir) })
	return built, err
}

// buildHelm makes Helm, which reports the version that the linker is told.
func buildHelm() (string, error) {
	return install("helm", helmVersion, "-s -w -X helm.sh/helm/v4/internal/version.version=v"+helmVersion, "helm.sh/helm/v4", "cmd/helm")
}

// linkerFlags set the version that the programs report.
func linkerFlags(v version) string {
	const pkg = "k8s.io/component-base/version"
	return fmt.Sprintf("-s -w -X %[1]s.gitVersion=v%[2]s -X %[1]s.gitMajor=1 -X %[1]s.gitMinor=%[3]d", pkg, v, v.minor)
}

func buildKubernetes(v version, dir string) error {
	what := fmt.Sprintf("kubernetes %s", v)
	say("%s: building; the first time takes 6 to 15 minutes on two cores and about 5 GB of Go caches", what)
	text, err := kubernetesGoMod(v, dir)
	if err != nil {
		return err
	}
	up, err := readUpstream(text)
	if err != nil {
		return err
	}
	files := map[string]string{"go.mod": up.goMod(v), "main.go": multicallSource}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	tidy, err := goCommand(dir, "mod", "tidy")
	if err != nil {
		return err
	}
	if err := runLong(what+": go mod tidy", "modules loaded", tidy); err != nil {
		return err
	}
	compile, err := goCommand(dir, "build", "-v", "-trimpath", "-ldflags", linkerFlags(v), "-o", "kubernetes", ".")
	if err != nil {
		return err
	}
	if err := runLong(what+": go build", "packages compiled", compile); err != nil {
		return err
	}
	bin := filepath.Join(dir, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		return err
	}
	for _, name := range kubernetesPrograms {
		if err := os.Symlink("../kubernetes", filepath.Join(bin, name)); err != nil {
			return err
		}
	}
	say("%s: built", what)
	return nil
}

// kubernetesGoMod is the text of k8s.io/kubernetes' own go.mod.
func kubernetesGoMod(v version, dir string) (string, error) {
	download, err := goCommand(dir, "mod", "download", "-json", "k8s.io/kubernetes@v"+v.String())
	if err != nil {
		return "", err
	}
	output, runErr := download.Output()
	var module struct{ GoMod, Error string }
	if err := json.Unmarshal(output, &module); err != nil || module.GoMod == "" {
		detail := module.Error
		var exit *exec.ExitError
		if detail == "" && errors.As(runErr, &exit) {
			detail = string(exit.Stderr)
		}
		return "", fmt.Errorf("cannot download k8s.io/kubernetes v%s: %s; check that the release exists and that the Go module proxy (`go env GOPROXY`) is reachable", v, strings.TrimSpace(detail))
	}
	text, err := os.ReadFile(module.GoMod)
	return string(text), err
}

// install builds commands of one module at one version, each in the module's own dependency versions.
func install(kind, version, linker, module string, packages ...string) (string, error) {
	args := []string{"install", "-v", "-trimpath", "-ldflags", linker}
	for _, pkg := range packages {
		args = append(args, fmt.Sprintf("%s/%s@v%s", module, pkg, version))
	}
	return cached(kind, version, strings.Join(append(args, goVersion), "\n"), func(dir string) error {
		what := fmt.Sprintf("%s %s", kind, version)
		say("%s: building", what)
		command, err := goCommand(dir, args...)
		if err != nil {
			return err
		}
		command.Env = append(command.Env, "GOBIN="+dir)
		return runLong(what, "modules and packages", command)
	})
}

func buildPause(dir string) error {
	files := map[string]string{"go.mod": "module kerf.dev/e2e/pause\n\ngo 1.26\n", "main.go": pauseSource}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	command, err := goCommand(dir, "build", "-trimpath", "-ldflags", "-s -w", "-o", "pause", ".")
	if err != nil {
		return err
	}
	return runLong("pause", "packages", command)
}

// goCommand prepares the go command in a folder: no cgo (nothing here needs a C compiler), no workspace, no flags from
// outside, and the right Go release, which the go command fetches itself when the installed one is another.
func goCommand(dir string, args ...string) (*exec.Cmd, error) {
	tool, err := exec.LookPath("go")
	if err != nil {
		return nil, fmt.Errorf("the go command is not on the PATH: install Go %s (any release since 1.21 fetches it)", goVersion)
	}
	probe := exec.Command(tool, "env", "GOVERSION")
	probe.Dir = os.TempDir() // outside any module, so that none asks for another release
	found, err := probe.Output()
	if err != nil {
		return nil, fmt.Errorf("`go env GOVERSION` failed: %w", err)
	}
	toolchain := "go" + goVersion
	if fits(strings.TrimSpace(string(found))) {
		toolchain = "local"
	}
	command := exec.Command(tool, args...)
	command.Dir = dir
	command.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=-buildvcs=false", "GOTOOLCHAIN="+toolchain)
	return command, nil
}

// fits reports whether an installed Go, such as go1.26.9, is goVersion or a later patch release of the same line.
func fits(installed string) bool {
	line, least, _ := cutLast(goVersion, ".")
	found, patch, _ := cutLast(strings.TrimPrefix(installed, "go"), ".")
	have, err := strconv.Atoi(patch)
	want, _ := strconv.Atoi(least)
	return err == nil && found == line && have >= want
}

// cutLast cuts text around the last separator.
func cutLast(text, separator string) (before, after string, found bool) {
	at := strings.LastIndex(text, separator)
	if at < 0 {
		return text, "", false
	}
	return text[:at], text[at+len(separator):], true
}
