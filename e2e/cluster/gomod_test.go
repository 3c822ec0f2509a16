package main

import (
	"strings"
	"testing"
)

const sampleGoMod = `// This is a generated file. Do not edit directly.

module k8s.io/kubernetes

go 1.26.0

godebug default=go1.26

require (
	bitbucket.org/bertimus9/systemstat v0.5.0
	github.com/spf13/cobra v1.10.2
	github.com/spf13/cobra-like v9.9.9
	k8s.io/api v0.0.0
)

require (
	go.etcd.io/etcd/client/v3 v3.6.7 // indirect
	go.etcd.io/etcd/server/v3 v3.6.8 // indirect
)

replace (
	k8s.io/api => ./staging/src/k8s.io/api
	k8s.io/kubelet => ./staging/src/k8s.io/kubelet // note
	example.test/other => example.test/fork v1.0.0
)

replace k8s.io/streaming => ./staging/src/k8s.io/streaming
`

func TestGoModReplacesEveryStagingModule(t *testing.T) {
	up, err := readUpstream(sampleGoMod)
	if err != nil {
		t.Fatal(err)
	}
	want := `module kerf.dev/e2e/kubernetes

go 1.26.0

require (
	github.com/spf13/cobra v1.10.2
	go.etcd.io/etcd/server/v3 v3.6.8
	k8s.io/component-base v0.36.3
	k8s.io/kubectl v0.36.3
	k8s.io/kubernetes v1.36.3
)

replace (
	k8s.io/api => k8s.io/api v0.36.3
	k8s.io/kubelet => k8s.io/kubelet v0.36.3
	k8s.io/streaming => k8s.io/streaming v0.36.3
)
`
	if got := up.goMod(version{36, 3}); got != want {
		t.Errorf("generated module file:\n%s\nwant:\n%s", got, want)
	}
}

func TestGoModSaysWhatIsMissing(t *testing.T) {
	for line, complaint := range map[string]string{
		"go 1.26.0\n":                                     "go line",
		"	github.com/spf13/cobra v1.10.2\n":               "github.com/spf13/cobra",
		"	go.etcd.io/etcd/server/v3 v3.6.8 // indirect\n": "go.etcd.io/etcd/server/v3",
		"./staging/":                                      "staging",
	} {
		_, err := readUpstream(strings.ReplaceAll(sampleGoMod, line, ""))
		if err == nil || !strings.Contains(err.Error(), complaint) {
			t.Errorf("without %q the error is %v, want one that names %q", line, err, complaint)
		}
	}
}
