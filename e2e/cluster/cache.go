package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
)

// cacheDir is where built programs are kept, outside any clone: $KERF_CACHE, or the user's cache folder.
func cacheDir() (string, error) {
	if dir := os.Getenv("KERF_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("cannot tell where to keep built programs: set KERF_CACHE or HOME (%w)", err)
	}
	return filepath.Join(home, ".cache", "kerf"), nil
}

// cacheEntry is the folder of one version of one thing.
func cacheEntry(kind, version string) (string, error) {
	root, err := cacheDir()
	return filepath.Join(root, kind, version), err
}

// recipeFile stands in every complete cache entry; it holds the digest of how the entry was made.
const recipeFile = "recipe"

// cached returns a cache entry. Unless an entry made by the same recipe is there, make fills a
// fresh folder, which gets its name only when it is complete: a build that was interrupted never looks like a result.
func cached(kind, version, recipe string, make func(dir string) error) (string, error) {
	entry, err := cacheEntry(kind, version)
	if err != nil {
		return "", err
	}
	digest := fmt.Sprintf("%x\n", sha256.Sum256([]byte(recipe)))
	if complete(entry, digest) {
		return entry, nil
	}
	if err := os.MkdirAll(filepath.Dir(entry), 0o755); err != nil {
		return "", fmt.Errorf("cannot make the cache folder: %w; KERF_CACHE chooses another", err)
	}
	lock := entry + ".lock"
	unlock, err := lockFile(lock, fmt.Sprintf("another build of %s %s", kind, version))
	if err != nil {
		return "", err
	}
	defer unlock()
	defer os.Remove(lock)        // while it is held
	if complete(entry, digest) { // the other build made it
		return entry, nil
	}
	fresh, old := entry+".new", entry+".old"
	for _, dir := range []string{fresh, old} { // of a build that was interrupted: the lock says that it is over
		if err := os.RemoveAll(dir); err != nil {
			return "", err
		}
	}
	if err := os.Mkdir(fresh, 0o755); err != nil {
		return "", err
	}
	if err := make(fresh); err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(fresh, recipeFile), []byte(digest), 0o644); err != nil {
		return "", err
	}
	if err := os.Rename(entry, old); err != nil && !os.IsNotExist(err) {
		return "", err
	}
	if err := os.Rename(fresh, entry); err != nil {
		return "", err
	}
	return entry, os.RemoveAll(old)
}

func complete(entry, digest string) bool {
	found, err := os.ReadFile(filepath.Join(entry, recipeFile))
	return err == nil && string(found) == digest
}
