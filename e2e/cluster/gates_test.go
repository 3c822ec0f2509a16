package main

import (
	"errors"
	"testing"
)

func TestParseVersion(t *testing.T) {
	for text, want := range map[string]string{"1.36.3": "1.36.3", "v1.34.0": "1.34.0"} {
		v, err := parseVersion(text)
		if err != nil || v.String() != want {
			t.Errorf("parseVersion(%q) = %s, %v; want %s", text, v, err, want)
		}
	}
	for _, text := range []string{"", "1.36", "1.33.9", "1.38.0", "2.36.3", "1.36.03", "1.36.3-rc.1"} {
		if v, err := parseVersion(text); !errors.Is(err, errUsage) {
			t.Errorf("parseVersion(%q) = %s, %v; want a usage error", text, v, err)
		}
	}
	for _, text := range triedKubernetes {
		if _, err := parseVersion(text); err != nil {
			t.Errorf("tried version %s: %v", text, err)
		}
	}
	if got := (version{36, 3}).Staging(); got != "v0.36.3" {
		t.Errorf("staging version %s, want v0.36.3", got)
	}
}

func TestChangeGates(t *testing.T) {
	v := version{36, 3}
	for _, c := range []struct{ before, list, want string }{
		{"", "", ""},
		{"", "default", ""},
		{"", "B=false,A=true", "A=true,B=false"},
		{"", "A=1", "A=true"},
		{"A=true", "B=true", "A=true,B=true"},
		{"A=true", "A=false", "A=false"},
		{"A=true,B=true", "default,B=false", "B=false"},
	} {
		before, err := changeGates(nil, c.before, v)
		if err != nil {
			t.Fatal(err)
		}
		after, err := changeGates(before, c.list, v)
		if err != nil || after.String() != c.want {
			t.Errorf("%q changed by %q: %q, %v; want %q", c.before, c.list, after, err, c.want)
		}
		if before.String() != c.before {
			t.Errorf("changing %q changed the original to %q", c.before, before)
		}
	}
	for _, list := range []string{"A", "A=maybe", "=true", "A=", "DRA"} {
		if _, err := changeGates(nil, list, v); !errors.Is(err, errUsage) {
			t.Errorf("gates %q: %v, want a usage error", list, err)
		}
	}
}

func TestDRAGatesFollowTheRelease(t *testing.T) {
	for minor, known := range map[int]bool{34: false, 35: true, 36: true, 37: true} {
		gates, err := changeGates(nil, "dra,DRAPartitionableDevices=false", version{minor, 0})
		if err != nil {
			t.Fatal(err)
		}
		if _, has := gates["DRADeviceTaintRules"]; has != known {
			t.Errorf("1.%d: DRADeviceTaintRules among the gates: %v, want %v", minor, has, known)
		}
		if gates["DRAPrioritizedList"] != "true" || gates["DRAPartitionableDevices"] != "false" {
			t.Errorf("1.%d: gates %q: what stands later must win", minor, gates)
		}
	}
}

func TestTaintGatesBringTheirAPI(t *testing.T) {
	for _, c := range []struct {
		minor               int
		gates, config, want string
	}{
		{34, "dra", "", "resource.k8s.io/v1alpha3=true"},
		{35, "dra", "", "resource.k8s.io/v1alpha3=true"},
		{36, "dra", "", "resource.k8s.io/v1beta2=true"},
		{37, "dra", "", ""},
		{34, "", "", ""},
		{36, "DRADeviceTaints=true", "", ""},
		{34, "dra", "resource.k8s.io/v1alpha3=false", "resource.k8s.io/v1alpha3=false"},
		{34, "dra", "a/v1=true", "a/v1=true,resource.k8s.io/v1alpha3=true"},
	} {
		v := version{c.minor, 0}
		gates, err := changeGates(nil, c.gates, v)
		if err != nil {
			t.Fatal(err)
		}
		config, err := parseRuntimeConfig(c.config)
		if err != nil {
			t.Fatal(err)
		}
		if got := withNeededAPIs(config, gates, v).String(); got != c.want {
			t.Errorf("1.%d with gates %q and %q: runtime configuration %q, want %q", c.minor, c.gates, c.config, got, c.want)
		}
	}
	if _, err := parseRuntimeConfig("resource.k8s.io/v1alpha3"); !errors.Is(err, errUsage) {
		t.Errorf("a runtime configuration without a value: %v, want a usage error", err)
	}
}

func TestGatesAsYAML(t *testing.T) {
	for list, want := range map[string]string{"": "{}", "B=false,A=true": "{A: true, B: false}"} {
		gates, err := changeGates(nil, list, version{36, 3})
		if err != nil || gates.yaml() != want {
			t.Errorf("gates %q as YAML: %s, %v; want %s", list, gates.yaml(), err, want)
		}
	}
}

func TestStatusShowsOnlyDifferentGates(t *testing.T) {
	cluster := switches{"A": "true", "B": "true"}
	for _, c := range []struct {
		own  switches
		want string
	}{
		{nil, ""},
		{switches{"A": "true", "B": "true"}, ""},
		{switches{"A": "true", "B": "false", "C": "true"}, "B=false, C=true"},
		{switches{}, "A not set, B not set"},
	} {
		if got := difference(c.own, cluster); got != c.want {
			t.Errorf("gates %v differ from %v in %q, want %q", c.own, cluster, got, c.want)
		}
	}
}
