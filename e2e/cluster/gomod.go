package main

import (
	"fmt"
	"strings"
)

// upstream is what the generated module takes over from the go.mod of k8s.io/kubernetes.
type upstream struct {
	// goLine is the language version, such as 1.26.0.
	goLine string
	// staging are the modules that Kubernetes replaces by folders of its own repository. Replace lines count only in
	// the main module, so ours has to replace every one of them by its published version.
	staging []string
	// versions of the modules that the program imports beside Kubernetes' own.
	cobra, etcd string
}

const (
	cobraModule = "github.com/spf13/cobra"
	etcdModule  = "go.etcd.io/etcd/server/v3"
)

// readUpstream reads the text of k8s.io/kubernetes' go.mod.
func readUpstream(text string) (upstream, error) {
	var up upstream
	block := ""
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "//")
		fields := strings.Fields(line)
		switch {
		case len(fields) == 0:
			continue
		case block == "" && len(fields) == 2 && fields[1] == "(":
			block = fields[0]
			continue
		case fields[0] == ")":
			block = ""
			continue
		}
		directive := block
		if block == "" {
			directive, fields = fields[0], fields[1:]
		}
		switch {
		case directive == "go" && len(fields) == 1:
			up.goLine = fields[0]
		case directive == "require" && len(fields) == 2 && fields[0] == cobraModule:
			up.cobra = fields[1]
		case directive == "require" && len(fields) == 2 && fields[0] == etcdModule:
			up.etcd = fields[1]
		case directive == "replace" && len(fields) == 3 && fields[1] == "=>" && strings.HasPrefix(fields[2], "./staging/"):
			up.staging = append(up.staging, fields[0])
		}
	}
	missing := ""
	switch {
	case up.goLine == "":
		missing = "go line"
	case up.cobra == "":
		missing = "requirement of " + cobraModule
	case up.etcd == "":
		missing = "requirement of " + etcdModule
	case len(up.staging) == 0:
		missing = "replace line for a staging module"
	}
	if missing != "" {
		return upstream{}, fmt.Errorf("the go.mod of k8s.io/kubernetes has no %s: its layout has changed, and gomod.go must follow it", missing)
	}
	return up, nil
}

// goMod writes the module file of the multi-call program; `go mod tidy` completes it.
func (up upstream) goMod(v version) string {
	var out strings.Builder
	fmt.Fprintf(&out, "module kerf.dev/e2e/kubernetes\n\ngo %s\n\nrequire (\n", up.goLine)
	fmt.Fprintf(&out, "\t%s %s\n\t%s %s\n", cobraModule, up.cobra, etcdModule, up.etcd)
	for _, direct := range []string{"k8s.io/component-base", "k8s.io/kubectl"} {
		fmt.Fprintf(&out, "\t%s %s\n", direct, v.Staging())
	}
	fmt.Fprintf(&out, "\tk8s.io/kubernetes v%s\n)\n\nreplace (\n", v)
	for _, module := range up.staging {
		fmt.Fprintf(&out, "\t%s => %s %s\n", module, module, v.Staging())
	}
	out.WriteString(")\n")
	return out.String()
}
