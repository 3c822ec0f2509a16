package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is the record of a process that the tool started. A process id alone may have gone to another process since;
// the start time and the boot make it unique, and no signal is sent unless all three fit.
type process struct {
	PID int `json:"pid"`
	// StartTime is in clock ticks since the boot (proc(5), stat field 22).
	StartTime uint64 `json:"startTime"`
	// Boot is /proc/sys/kernel/random/boot_id.
	Boot string `json:"boot"`
}

// recordOf describes a process that is certainly alive: a child that was not waited for yet.
func recordOf(pid int) (process, error) {
	boot, err := bootID()
	if err != nil {
		return process{}, err
	}
	_, start, err := procStat(pid)
	if err != nil {
		return process{}, err
	}
	return process{PID: pid, StartTime: start, Boot: boot}, nil
}

func bootID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text)), err
}

// procStat reads a process's state letter and start time.
func procStat(pid int) (state byte, start uint64, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	return parseStat(string(text))
}

// parseStat reads /proc/PID/stat; the program's name in it may hold blanks and parentheses, so fields are counted from
// the last closing one.
func parseStat(text string) (state byte, start uint64, err error) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 20 {
		return 0, 0, fmt.Errorf("unexpected content of /proc/PID/stat: %q", text)
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	return fields[0][0], start, err
}

// alive reports whether this very process still runs; a zombie does not.
func (p process) alive() bool {
	boot, err := bootID()
	if err != nil || p.PID <= 0 || boot != p.Boot {
		return false
	}
	state, start, err := procStat(p.PID)
	return err == nil && start == p.StartTime && state != 'Z' && state != 'X'
}

// signal sends a signal to this very process. The handle is taken before the check, so that what is checked is what
// gets the signal.
func (p process) signal(s syscall.Signal) error {
	handle, err := os.FindProcess(p.PID)
	if err != nil || !p.alive() {
		return nil
	}
	defer handle.Release()
	if err := handle.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("cannot signal process %d: %w", p.PID, err)
	}
	return nil
}

// waitGone waits until the process has ended and reports whether it did in time.
func (p process) waitGone(patience time.Duration) bool {
	for deadline := time.Now().Add(patience); p.alive(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

// end asks a process to end and, when it does not within patience, ends it.
func (p process) end(patience time.Duration) error {
	if err := p.signal(syscall.SIGTERM); err != nil {
		return err
	}
	if p.waitGone(patience) {
		return nil
	}
	return p.kill()
}

// kill ends a process at once.
func (p process) kill() error {
	if err := p.signal(syscall.SIGKILL); err != nil {
		return err
	}
	if !p.waitGone(10 * time.Second) {
		return fmt.Errorf("process %d does not end after SIGKILL: it hangs in the kernel", p.PID)
	}
	return nil
}

// residentBytes is the resident memory of the process, 0 when it is gone.
func (p process) residentBytes() uint64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.PID))
	if err != nil || !p.alive() {
		return 0
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0
	}
	pages, err := strconv.ParseUint(fields[1], 10, 64)
	if err != nil {
		return 0
	}
	return pages * uint64(os.Getpagesize())
}

// recordPath is where the process of a component or of a namespace is recorded.
func (c *cluster) recordPath(key string) string { return c.path("run", key+".json") }

// recorded reads a record; a missing one is a process that is not alive.
func (c *cluster) recorded(key string) (process, error) {
	var p process
	text, err := os.ReadFile(c.recordPath(key))
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil {
		return p, fmt.Errorf("cannot read the record of %s: %w", key, err)
	}
	return p, nil
}

// launch starts a command in a session of its own, so that it outlives the tool and its terminal, and records it.
func (c *cluster) launch(key string, command *exec.Cmd) (process, error) {
	log := c.path("log", key+".log")
	if err := os.MkdirAll(filepath.Dir(log), 0o755); err != nil {
		return process{}, err
	}
	output, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return process{}, err
	}
	defer output.Close()
	command.Stdout, command.Stderr = output, output
	if command.SysProcAttr == nil {
		command.SysProcAttr = &syscall.SysProcAttr{}
	}
	command.SysProcAttr.Setsid = true
	if err := command.Start(); err != nil {
		return process{}, fmt.Errorf("cannot start %s: %w", key, err)
	}
	p, err := recordOf(command.Process.Pid)
	if err != nil {
		return process{}, fmt.Errorf("%s ended at once: %w", key, err)
	}
	text, err := json.Marshal(p)
	if err != nil {
		return process{}, err
	}
	return p, writeFile(c.recordPath(key), append(text, '\n'), 0o644)
}
