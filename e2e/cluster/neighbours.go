package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// cmdNeighbours builds programs of others that the scenarios run beside kerf. Each is described by a folder with a go.mod, whose
// `tool` lines name the programs, and its go.sum: another folder is all that another neighbour needs.
func cmdNeighbours(args []string) error {
	set, _ := flagSet("neighbours")
	words, rest, err := parse(set, args)
	if err != nil {
		return err
	}
	if len(words) != 2 || len(rest) > 0 {
		return usageError("neighbours takes the folder with their modules, and the folder in which to link what is built of each")
	}
	from, links := words[0], words[1]
	modules, err := filepath.Glob(filepath.Join(from, "*", "go.mod"))
	if err != nil {
		return err
	}
	if len(modules) == 0 {
		return fmt.Errorf("there is no go.mod in the folders of %s", from)
	}
	built := map[string]string{}
	for _, module := range modules {
		folder := filepath.Dir(module)
		if built[filepath.Base(folder)], err = buildNeighbour(folder); err != nil {
			return err
		}
	}
	return linkAll(links, built)
}

// buildNeighbour makes the programs of one module, by the versions that its go.sum holds. They reach NVML through cgo.
func buildNeighbour(module string) (string, error) {
	module, err := filepath.Abs(module)
	if err != nil {
		return "", err
	}
	args := []string{"build", "-v", "-trimpath", "-ldflags", "-s -w"}
	recipe := []string{goVersion, strings.Join(args, " ")}
	for _, file := range []string{"go.mod", "go.sum"} {
		text, err := os.ReadFile(filepath.Join(module, file))
		if err != nil {
			return "", fmt.Errorf("a neighbour is a folder with go.mod and go.sum: %w", err)
		}
		recipe = append(recipe, string(text))
	}
	text, name := strings.Join(recipe, "\n"), filepath.Base(module)
	version := fmt.Sprintf("%s-%.6x", name, sha256.Sum256([]byte(text)))
	return cached("neighbours", version, text, func(dir string) error {
		say("%s: building; the first time takes a few minutes on two cores", name)
		command, err := goCommand(module, append(args, "-o", dir+"/", "tool")...)
		if err != nil {
			return err
		}
		command.Env = append(command.Env, "CGO_ENABLED=1")
		return runLong(name, "modules and packages", command)
	})
}

// linkAll makes a folder hold these links and nothing else.
func linkAll(dir string, targets map[string]string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	there, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range there {
		if entry.Type() != os.ModeSymlink {
			return fmt.Errorf("%s holds %s, which is no link: choose another folder for the links", dir, entry.Name())
		}
		if err := os.Remove(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	for _, name := range sortedKeys(targets) {
		if err := os.Symlink(targets[name], filepath.Join(dir, name)); err != nil {
			return err
		}
		fmt.Println(filepath.Join(dir, name))
	}
	return nil
}
