package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// switches maps names to values: feature gates, or the API server's runtime configuration.
type switches map[string]string

// draGate is a feature gate of dynamic resource allocation that kerf uses, and the first minor release that knows it.
type draGate struct {
	name  string
	since int
}

// draGates is what the word "dra" stands for. Source: pkg/features/kube_features.go of the releases 1.34 to 1.37.
// Switching on a gate that a release has locked to "on" is allowed there.
var draGates = []draGate{
	// A scheduler of 1.34 ends at a request for more devices than the slice has in which one is found ("index out of range" in
	// k8s.io/dynamic-resource-allocation/structured/internal/experimental, CmpRequestOverCapacity, called with a request's index).
	{"DRAConsumableCapacity", 35},
	{"DRADeviceBindingConditions", 34},
	{"DRADeviceTaintRules", 35},
	{"DRADeviceTaints", 34},
	{"DRAExtendedResource", 34},
	{"DRAPartitionableDevices", 34},
	{"DRAPrioritizedList", 34},
	{"DRAResourceClaimDeviceStatus", 34},
	// Alpha before. A kubelet that prepares a claim again after its start lists the device twice then, and the API server refuses
	// the pod's status from there on (pkg/kubelet/cm/dra/manager.go of 1.34 and 1.35, UpdateAllocatedResourcesStatus).
	{"ResourceHealthStatus", 36},
}

// changeGates applies a list such as "dra,A=false" to a copy of gates, from left to right: "default" empties the set,
// "dra" switches on every gate of draGates that the release knows.
func changeGates(gates switches, list string, v version) (switches, error) {
	out := maps.Clone(gates)
	if out == nil {
		out = switches{}
	}
	for _, item := range splitList(list) {
		name, value, assigned := strings.Cut(item, "=")
		switch {
		case item == "default":
			clear(out)
		case item == "dra":
			for _, gate := range draGates {
				if v.minor >= gate.since {
					out[gate.name] = "true"
				}
			}
		case !assigned || name == "":
			return nil, usageError("feature gate %q is neither NAME=true|false nor one of the words dra, default", item)
		default:
			on, err := strconv.ParseBool(value)
			if err != nil {
				return nil, usageError("feature gate %s: the value must be true or false, not %q", name, value)
			}
			out[name] = strconv.FormatBool(on)
		}
	}
	return out, nil
}

// parseRuntimeConfig reads "resource.k8s.io/v1beta2=true,...".
func parseRuntimeConfig(list string) (switches, error) {
	out := switches{}
	for _, item := range splitList(list) {
		name, value, assigned := strings.Cut(item, "=")
		if !assigned || name == "" || value == "" {
			return nil, usageError("runtime configuration %q is not of the form GROUP/VERSION=true|false", item)
		}
		out[name] = value
	}
	return out, nil
}

// withNeededAPIs adds the API versions without which the given gates stop the scheduler: it waits for ever for an
// informer on DeviceTaintRule when its gate is on and the API version that serves it is off. What the user said wins.
func withNeededAPIs(config, gates switches, v version) switches {
	out := maps.Clone(config)
	if out == nil {
		out = switches{}
	}
	need := func(api string) {
		if _, said := out[api]; !said {
			out[api] = "true"
		}
	}
	switch {
	case v.minor <= 35 && (gates["DRADeviceTaints"] == "true" || gates["DRADeviceTaintRules"] == "true"):
		need("resource.k8s.io/v1alpha3")
	case v.minor == 36 && gates["DRADeviceTaintRules"] == "true":
		need("resource.k8s.io/v1beta2")
	}
	return out
}

// String writes the switches as a flag's value, in a fixed order.
func (s switches) String() string {
	var items []string
	for _, name := range slices.Sorted(maps.Keys(s)) {
		items = append(items, name+"="+s[name])
	}
	return strings.Join(items, ",")
}

// yaml writes the switches as a YAML flow mapping of booleans.
func (s switches) yaml() string {
	var items []string
	for _, name := range slices.Sorted(maps.Keys(s)) {
		items = append(items, fmt.Sprintf("%s: %s", name, s[name]))
	}
	return "{" + strings.Join(items, ", ") + "}"
}

// splitList cuts a comma-separated list and drops empty items.
func splitList(list string) []string {
	return slices.DeleteFunc(strings.Split(list, ","), func(item string) bool { return item == "" })
}
