package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

var started = time.Now()

// say reports progress on the standard error output, with the seconds since the tool started.
func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "[%6.1fs] %s\n", time.Since(started).Seconds(), fmt.Sprintf(format, args...))
}

// reportEvery is how often a long command says that it is alive.
const reportEvery = 15 * time.Second

// keptLines is how much of a failed command's output its error shows.
const keptLines = 25

// runLong runs a command that may take minutes. Its output is counted, not shown: every reportEvery one line tells how
// many lines there were (the go command writes one for each module it loads and each package it compiles) and the last
// of them.
func runLong(what, unit string, command *exec.Cmd) error {
	var lines lineCounter
	command.Stdout, command.Stderr = &lines, &lines
	// The command ends with the tool: a build that goes on alone would write where the next one starts. The kernel ties
	// this to the thread that starts it, so the thread has to stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := command.Start(); err != nil {
		return fmt.Errorf("%s: cannot start %s: %w", what, command.Path, err)
	}
	done := make(chan struct{})
	var reporter sync.WaitGroup
	reporter.Go(func() {
		ticker := time.NewTicker(reportEvery)
		defer ticker.Stop()
		for {
			select {
			case <-done:
				return
			case <-ticker.C:
				if count, last := lines.state(); count == 0 {
					say("%s: at work", what)
				} else {
					say("%s: %d %s so far, the last: %s", what, count, unit, last)
				}
			}
		}
	})
	err := command.Wait()
	close(done)
	reporter.Wait()
	if err != nil {
		return fmt.Errorf("%s: `%s` failed (%w); the end of its output:\n%s", what, strings.Join(command.Args, " "), err, lines.tail())
	}
	return nil
}

// lineCounter counts the lines written to it and keeps the last ones.
type lineCounter struct {
	mutex   sync.Mutex
	partial []byte
	count   int
	kept    []string
}

// Write implements io.Writer.
func (l *lineCounter) Write(data []byte) (int, error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.partial = append(l.partial, data...)
	for {
		line, after, complete := bytes.Cut(l.partial, []byte{'\n'})
		if !complete {
			return len(data), nil
		}
		l.keep(string(line))
		l.partial = after
	}
}

func (l *lineCounter) keep(line string) {
	l.count++
	l.kept = append(l.kept, line)
	if len(l.kept) > keptLines {
		l.kept = l.kept[1:]
	}
}

func (l *lineCounter) state() (count int, last string) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if len(l.kept) > 0 {
		last = l.kept[len(l.kept)-1]
	}
	return l.count, last
}

func (l *lineCounter) tail() string {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return strings.Join(append(l.kept, string(l.partial)), "\n")
}

// lastLines returns the end of a log file, for errors.
func lastLines(path string) string {
	file, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer file.Close()
	var lines lineCounter
	scanner := bufio.NewScanner(file)
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		lines.keep(scanner.Text())
	}
	return lines.tail()
}
