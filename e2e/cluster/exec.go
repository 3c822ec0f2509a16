package main

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
)

func cmdKubeconfig(args []string) error {
	set, name := flagSet("kubeconfig")
	words, rest, err := parse(set, args)
	if err != nil {
		return err
	}
	if err := noWords(set, words, rest); err != nil {
		return err
	}
	c, err := loadCluster(*name)
	if err != nil {
		return err
	}
	fmt.Println(c.kubeconfig("admin"))
	return nil
}

// cmdExec becomes nsenter, which becomes the command: its process id is the one that the caller started.
func cmdExec(args []string) error {
	set, name := flagSet("exec")
	node := set.String("node", "", "")
	// Flags end at the first word: what follows belongs to the command.
	if err := parseOnce(set, args); err != nil {
		return err
	}
	if set.NArg() == 0 {
		return usageError("exec needs a command")
	}
	c, err := loadCluster(*name)
	if err != nil {
		return err
	}
	if _, err := c.nodesNamed(*node); err != nil {
		return err
	}
	inside, err := c.enter(*node)
	if err != nil {
		return err
	}
	built, err := c.builtPrograms()
	if err != nil {
		return err
	}
	nsenter, err := exec.LookPath("nsenter")
	if err != nil {
		return fmt.Errorf("nsenter is not on the PATH: run `apt-get install -y util-linux`")
	}
	own, err := os.Executable()
	if err != nil {
		return err
	}
	environment := map[string]string{
		"KUBECONFIG":        c.kubeconfig("admin"),
		"PATH":              built.path(),
		"KERF_CLUSTER":      own,
		"KERF_CLUSTER_NAME": c.name,
	}
	if *node != "" {
		environment["CONTAINERD_ADDRESS"] = c.containerdSocket(*node)
		environment["CONTAINERD_NAMESPACE"] = "k8s.io"
	}
	for variable, value := range environment {
		if err := os.Setenv(variable, value); err != nil {
			return err
		}
	}
	line := inside.nsenterArgs(set.Args()...)
	if folder, err := os.Getwd(); err == nil {
		line = slices.Insert(line, 1, "--wdns="+folder)
	}
	return fmt.Errorf("cannot run nsenter: %w", syscall.Exec(nsenter, line, os.Environ()))
}
