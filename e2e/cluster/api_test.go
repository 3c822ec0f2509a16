package main

import (
	"strings"
	"testing"
	"time"
)

func TestNodeIsReadyByItsOwnWord(t *testing.T) {
	since := time.Date(2030, 1, 1, 12, 0, 0, 700e6, time.UTC)
	node := func(taints, status, heartbeat string) string {
		return `{"spec": {"taints": [` + taints + `]}, "status": {"conditions": [
			{"type": "MemoryPressure", "status": "False", "lastHeartbeatTime": "` + heartbeat + `"},
			{"type": "Ready", "status": "` + status + `", "message": "why", "lastHeartbeatTime": "` + heartbeat + `"}]}}`
	}
	const fresh, stale = "2030-01-01T12:00:00Z", "2030-01-01T11:59:59Z"
	for _, c := range []struct{ node, complaint string }{
		{node("", "True", fresh), ""},
		{node(`{"key": "example.com/mine", "effect": "NoSchedule"}`, "True", fresh), ""},
		{node("", "True", stale), "not reported"},
		{node("", "False", fresh), "why"},
		{node(`{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}`, "True", fresh), "not-ready:NoSchedule"},
		{`{}`, "no Ready condition"},
		{`<`, "invalid character"},
	} {
		err := checkNode([]byte(c.node), since)
		if (err == nil) != (c.complaint == "") || (err != nil && !strings.Contains(err.Error(), c.complaint)) {
			t.Errorf("node %s: %v, want %q", c.node, err, c.complaint)
		}
	}
}
