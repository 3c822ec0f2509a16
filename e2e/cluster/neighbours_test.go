package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestNeighboursAreBuiltFromTheirFolders(t *testing.T) {
	t.Setenv("KERF_CACHE", t.TempDir())
	from, links := t.TempDir(), filepath.Join(t.TempDir(), "links")
	// A module whose tools are its own packages: nothing is downloaded.
	write := func(module, tool, says string) {
		for name, text := range map[string]string{
			"go.mod":                  "module kerf.test/" + module + "\n\ngo 1.26\n\ntool kerf.test/" + module + "/" + tool + "\n",
			"go.sum":                  "",
			"unrelated.txt":           says,
			tool + "/" + tool + ".go": "package main\n\nfunc main() { println(\"" + says + "\") }\n",
		} {
			path := filepath.Join(from, module, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	says := func(module, tool string) string {
		output, err := exec.Command(filepath.Join(links, module, tool)).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v %s", tool, err, output)
		}
		return strings.TrimSpace(string(output))
	}
	write("one", "first", "hello")
	write("two", "second", "good day")
	if err := cmdNeighbours([]string{from, links}); err != nil {
		t.Fatal(err)
	}
	if a, b := says("one", "first"), says("two", "second"); a != "hello" || b != "good day" {
		t.Errorf("the programs say %q and %q", a, b)
	}
	// Only go.mod and go.sum say what a neighbour is: what else lies there changes nothing.
	write("one", "first", "changed")
	if err := os.RemoveAll(filepath.Join(from, "two")); err != nil {
		t.Fatal(err)
	}
	if err := cmdNeighbours([]string{from, links}); err != nil {
		t.Fatal(err)
	}
	if a := says("one", "first"); a != "hello" {
		t.Errorf("the program was built again: it says %q", a)
	}
	if _, err := os.Lstat(filepath.Join(links, "two")); !os.IsNotExist(err) {
		t.Errorf("the link of a neighbour that is gone is still there (%v)", err)
	}
	write("one", "other", "moved")
	if err := cmdNeighbours([]string{from, links}); err != nil {
		t.Fatal(err)
	}
	if a := says("one", "other"); a != "moved" {
		t.Errorf("another go.mod gives the program %q", a)
	}
}

func TestNeighboursLeaveOtherFilesAlone(t *testing.T) {
	dir := t.TempDir()
	mine := filepath.Join(dir, "mine")
	if err := os.WriteFile(mine, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := linkAll(dir, map[string]string{"folder": "/bin"}); err == nil || !strings.Contains(err.Error(), "is no link") {
		t.Errorf("a folder with a file: %v", err)
	}
	if _, err := os.Stat(mine); err != nil {
		t.Error(err)
	}
}
