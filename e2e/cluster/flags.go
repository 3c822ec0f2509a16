package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

// flagSet makes the flags of one command, with --name among them; errors come back instead of being printed.
func flagSet(command string) (*flag.FlagSet, *string) {
	set := flag.NewFlagSet(command, flag.ContinueOnError)
	set.SetOutput(io.Discard)
	name := os.Getenv("KERF_CLUSTER_NAME")
	if name == "" {
		name = "main"
	}
	return set, set.String("name", name, "name of the cluster")
}

// parse reads the flags wherever they stand and returns the other arguments; everything after "--" is left alone and
// comes back as rest.
func parse(set *flag.FlagSet, args []string) (words, rest []string, err error) {
	for i, arg := range args {
		if arg == "--" {
			args, rest = args[:i], args[i+1:]
			break
		}
	}
	for {
		if err := parseOnce(set, args); err != nil {
			return nil, nil, err
		}
		if set.NArg() == 0 {
			return words, rest, nil
		}
		words, args = append(words, set.Arg(0)), set.Args()[1:]
	}
}

// parseOnce reads flags up to the first word that is none.
func parseOnce(set *flag.FlagSet, args []string) error {
	switch err := set.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return err
	case err != nil:
		return usageError("%s: %v", set.Name(), err)
	}
	return nil
}

// noWords is the error for arguments that a command does not take.
func noWords(set *flag.FlagSet, words, rest []string) error {
	if extra := append(words, rest...); len(extra) > 0 {
		return usageError("%s takes no argument %q", set.Name(), strings.Join(extra, " "))
	}
	return nil
}

// isSet reports whether the user gave this flag.
func isSet(set *flag.FlagSet, name string) bool {
	given := false
	set.Visit(func(f *flag.Flag) { given = given || f.Name == name })
	return given
}

func usageError(format string, args ...any) error {
	return fmt.Errorf(format+"; %w", append(args, errUsage)...)
}
