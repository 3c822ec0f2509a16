package main

import (
	"fmt"
	"regexp"
	"strconv"
)

// What is built when nothing else is asked for.
const (
	defaultKubernetes = "1.36.3"
	containerdVersion = "2.4.2"
	cniVersion        = "1.10.0"
	pauseVersion      = "1"
)

// triedKubernetes are the versions that were seen to build and to run here. Every patch release of a known minor
// release is accepted: the module file is generated from that release's own.
var triedKubernetes = []string{"1.34.4", "1.35.4", "1.36.3", "1.37.2"}

// The minor releases that the gate table (gates.go) and the module generator know.
const (
	oldestMinor = 34
	newestMinor = 37
)

// version is a Kubernetes release 1.minor.patch.
type version struct {
	minor, patch int
}

var versionPattern = regexp.MustCompile(`^v?1\.(0|[1-9]\d{0,2})\.(0|[1-9]\d{0,2})$`)

// parseVersion reads "1.36.3" (a leading v is allowed).
func parseVersion(text string) (version, error) {
	match := versionPattern.FindStringSubmatch(text)
	if match == nil {
		return version{}, usageError("Kubernetes version %q is not of the form 1.36.3", text)
	}
	minor, _ := strconv.Atoi(match[1])
	patch, _ := strconv.Atoi(match[2])
	if minor < oldestMinor || minor > newestMinor {
		return version{}, usageError("Kubernetes %s is not supported: take 1.%d to 1.%d (tried: %v)", text, oldestMinor, newestMinor, triedKubernetes)
	}
	return version{minor, patch}, nil
}

// String is the release without "v", such as 1.36.3.
func (v version) String() string { return fmt.Sprintf("1.%d.%d", v.minor, v.patch) }

// Staging is the version of the modules published from the staging folder of this release, such as v0.36.3.
func (v version) Staging() string { return fmt.Sprintf("v0.%d.%d", v.minor, v.patch) }
