package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// lockFile takes an exclusive lock on path, which ends with the process at the latest, and says what it waits for. The
// holder may remove the file: whoever waited for it then starts over with a new one.
func lockFile(path, holder string) (unlock func(), err error) {
	for {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, fmt.Errorf("cannot lock: %w", err)
		}
		file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
		if errors.Is(err, fs.ErrNotExist) { // the folder was removed in between
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("cannot lock: %w", err)
		}
		if syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
			say("waiting for %s to end (%s)", holder, path)
			if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
				file.Close()
				return nil, fmt.Errorf("cannot lock %s: %w", path, err)
			}
		}
		if isStill(path, file) {
			return func() { file.Close() }, nil
		}
		file.Close()
	}
}

// isStill reports whether path still names the open file.
func isStill(path string, file *os.File) bool {
	opened, err := file.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(path)
	return err == nil && os.SameFile(opened, named)
}

// writeFile replaces a file as a whole: a reader sees the old content or the new, never a part.
func writeFile(path string, content []byte, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	fresh := path + ".new"
	if err := os.WriteFile(fresh, content, mode); err != nil {
		return err
	}
	return os.Rename(fresh, path)
}
