package main

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestCacheKeepsOnlyCompleteBuilds(t *testing.T) {
	t.Setenv("KERF_CACHE", t.TempDir())
	builds := 0
	make := func(fail error) func(string) error {
		return func(dir string) error {
			builds++
			if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
				t.Errorf("the build starts in a folder with %v (error %v), want an empty one", entries, err)
			}
			if err := os.WriteFile(filepath.Join(dir, "program"), []byte{byte(builds)}, 0o755); err != nil {
				t.Fatal(err)
			}
			return fail
		}
	}
	broken := errors.New("broken")
	if _, err := cached("k", "1", "recipe", make(broken)); !errors.Is(err, broken) {
		t.Fatalf("a failed build gives %v", err)
	}
	for _, step := range []struct {
		recipe string
		builds int
	}{{"recipe", 2}, {"recipe", 2}, {"changed", 3}, {"changed", 3}} {
		dir, err := cached("k", "1", step.recipe, make(nil))
		if err != nil || builds != step.builds {
			t.Fatalf("recipe %q: %d builds, want %d (error %v)", step.recipe, builds, step.builds, err)
		}
		if content, err := os.ReadFile(filepath.Join(dir, "program")); err != nil || content[0] != byte(step.builds) {
			t.Errorf("the cache holds build %v (error %v), want %d", content, err, step.builds)
		}
	}
	entries, err := os.ReadDir(filepath.Join(os.Getenv("KERF_CACHE"), "k"))
	if err != nil || len(entries) != 1 {
		t.Errorf("the cache holds %v (error %v), want the one entry", entries, err)
	}
}

func TestInstalledGoMustBeOfTheLine(t *testing.T) {
	for installed, want := range map[string]bool{
		"go" + goVersion: true, "go1.26.99": true, "go1.26.0": false, "go1.27.1": false, "go1.25.20": false, "go1.26rc1": false, "devel": false,
	} {
		if got := fits(installed); got != want {
			t.Errorf("installed Go %s fits: %v, want %v", installed, got, want)
		}
	}
}
