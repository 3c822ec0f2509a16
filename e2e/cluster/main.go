// Command kerf-cluster builds a real Kubernetes from its Go modules and runs it on this machine, inside network and mount
// namespaces of its own: etcd, the control plane, and one or more nodes with kubelet, kube-proxy and containerd.
//
// Nothing it starts listens outside those namespaces, so several clusters and other work on the machine do not meet.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
)

const usage = `kerf-cluster: a real Kubernetes on this machine, in namespaces of its own

  kerf-cluster build [--kubernetes V | helm]  build Kubernetes V, containerd, the CNI plugins and Helm, or Helm alone,
                                              into the cache
  kerf-cluster neighbours FOLDER LINKS        build the programs that each module in FOLDER names, programs of others,
                                              into the cache; LINKS then leads to those of each by its folder's name
  kerf-cluster up [--kubernetes V] [--feature-gates G] [--runtime-config R] [--nodes A,B | --control-plane-only]
                                              build what is missing, start the cluster, wait until its nodes are Ready
  kerf-cluster down [--purge]                 power the cluster off; --purge also removes all it knows
  kerf-cluster status [--json]                what runs: pids, resident memory, folders, gates
  kerf-cluster kubeconfig                     print the path of the admin's kubeconfig
  kerf-cluster exec [--node N] [--] CMD...    run CMD in the control plane's namespaces, or in node N's;
                                              KUBECONFIG is set, kubectl and helm are on the PATH
  kerf-cluster start|stop|kill|restart COMPONENT [--node N] [--feature-gates G] [--runtime-config R] [-- FLAG...]
                                              stop asks first (SIGTERM), kill does not (SIGKILL); start and restart
                                              wait until COMPONENT answers. Given gates change the recorded ones of
                                              that component, and FLAGs after -- replace its extra flags.
  kerf-cluster power-off [NODE]               cut a node's power: its programs and containers end at once, and what a
                                              real node has in memory (/run) is gone; start them again
  kerf-cluster load-image [--node N] [FILE...]
                                              import OCI image archives that are not there yet; without FILE the two
                                              built-in test images

  COMPONENT: etcd kube-apiserver kube-controller-manager kube-scheduler   (control plane)
             kubelet kube-proxy containerd                                (every node, or node N)
  G: A=true,B=false; the word "dra" stands for every DRA gate that kerf uses, "default" for none
  --name NAME, in front of any command's arguments or among them, chooses a cluster other than "main"

environment:
  KERF_CACHE         where built programs are kept           ($HOME/.cache/kerf)
  KERF_CLUSTER_DIR   where the clusters' state folders are   (/var/lib/kerf-e2e)
  KERF_CLUSTER_NAME  the default of --name                   (main)
`

// errUsage marks an error that the user repairs by calling the tool differently: the usage is worth a hint.
var errUsage = errors.New("see `kerf-cluster help`")

// command is what a subcommand does with its arguments.
type command func(args []string) error

var commands = map[string]command{
	"build":      cmdBuild,
	"up":         cmdUp,
	"down":       cmdDown,
	"status":     cmdStatus,
	"kubeconfig": cmdKubeconfig,
	"exec":       cmdExec,
	"start":      func(args []string) error { return cmdComponent("start", args) },
	"stop":       func(args []string) error { return cmdComponent("stop", args) },
	"kill":       func(args []string) error { return cmdComponent("kill", args) },
	"restart":    func(args []string) error { return cmdComponent("restart", args) },
	"load-image": cmdLoadImage,
	"neighbours": cmdNeighbours,
	"power-off":  cmdPowerOff,
}

func main() {
	args := os.Args[1:]
	// `kerf-cluster --name X up`: the flag belongs to every command, so it may also come first.
	var front []string
	for len(args) >= 2 && (args[0] == "--name" || args[0] == "-name") {
		front, args = append(front, args[:2]...), args[2:]
	}
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	switch args[0] {
	case "help", "--help", "-h":
		fmt.Print(usage)
		return
	}
	run, known := commands[args[0]]
	if !known {
		fmt.Fprintf(os.Stderr, "kerf-cluster: unknown command %q; see `kerf-cluster help`\n", args[0])
		os.Exit(2)
	}
	switch err := run(append(front, args[1:]...)); {
	case errors.Is(err, flag.ErrHelp):
		fmt.Print(usage)
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "kerf-cluster:", err)
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "kerf-cluster:", err)
		os.Exit(1)
	}
}
