package main

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

func TestParseStatWithAStrangeName(t *testing.T) {
	const text = "42 (a) (b c) R 1 42 42 0 -1 4194304 100 0 0 0 1 2 0 0 20 0 1 0 987654 1000 50 18446744073709551615"
	state, start, err := parseStat(text)
	if err != nil || state != 'R' || start != 987654 {
		t.Errorf("state %c, start %d, error %v; want R, 987654", state, start, err)
	}
	if _, _, err := parseStat("42 (a) R 1"); err == nil {
		t.Error("a short line gives no error")
	}
}

func TestOnlyTheRecordedProcessIsEnded(t *testing.T) {
	c := testCluster(t)
	p, err := c.launch("sleeper", exec.Command("sleep", "600"))
	if err != nil {
		t.Fatal(err)
	}
	if recorded, err := c.recorded("sleeper"); err != nil || recorded != p || !recorded.alive() {
		t.Fatalf("recorded %+v, error %v; want %+v, alive", recorded, err, p)
	}
	for what, other := range map[string]process{
		"another start time": {p.PID, p.StartTime + 1, p.Boot},
		"another boot":       {p.PID, p.StartTime, "another"},
		"no process":         {},
	} {
		if other.alive() {
			t.Errorf("%s: taken for the recorded process", what)
		}
		if err := other.kill(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if other.residentBytes() != 0 {
			t.Errorf("%s: has memory", what)
		}
	}
	if !p.alive() || p.residentBytes() == 0 {
		t.Fatal("a record that does not fit ended the process")
	}
	if err := p.end(10 * time.Second); err != nil || p.alive() {
		t.Errorf("alive %v, error %v after the end", p.alive(), err)
	}
	if err := p.end(time.Second); err != nil {
		t.Errorf("ending it twice: %v", err)
	}
}

func TestAProcessThatIgnoresSIGTERMIsKilled(t *testing.T) {
	c := testCluster(t)
	ready := c.path("ready")
	p, err := c.launch("stubborn", exec.Command("sh", "-c", "trap '' TERM; : >"+ready+"; while :; do sleep 0.1; done"))
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(ready); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the process does not start")
		}
	}
	if err := p.end(50 * time.Millisecond); err != nil || p.alive() {
		t.Errorf("alive %v, error %v", p.alive(), err)
	}
}

func TestAZombieIsNotAlive(t *testing.T) {
	command := exec.Command("true")
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	defer command.Wait()
	p, err := recordOf(command.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if !p.waitGone(10 * time.Second) {
		t.Error("a child that ended and was not waited for counts as alive")
	}
	if err := syscall.Kill(p.PID, 0); err != nil {
		t.Errorf("the test is void, the child is no zombie: %v", err)
	}
}

func TestShimsAreKnownByTheClustersSocket(t *testing.T) {
	c := &cluster{name: "main", dir: "/var/lib/kerf-e2e/main"}
	shim := func(address string) []string {
		return []string{"/cache/containerd-shim-runc-v2", "-namespace", "k8s.io", "-id", "x", "-address", address}
	}
	for address, want := range map[string]bool{
		c.containerdSocket("node-a"):                          true,
		"/var/lib/kerf-e2e/main2/node-a/containerd.sock":      false,
		"/var/lib/kerf-e2e/main/node-a/other/containerd.sock": false,
		"/run/containerd/containerd.sock":                     false,
	} {
		if got := c.shimAddress(shim(address)) != ""; got != want {
			t.Errorf("shim of %s is ours: %v, want %v", address, got, want)
		}
	}
	for _, line := range [][]string{{"grep", "-address", c.containerdSocket("node-a")}, nil, {"containerd-shim-runc-v2", "-address"}} {
		if address := c.shimAddress(line); address != "" {
			t.Errorf("%q is taken for a shim of %s", line, address)
		}
	}
}
