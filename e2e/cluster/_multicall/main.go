// Command kubernetes is every program of a Kubernetes cluster in one file, told apart by the name it is called by:
// kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy, kubectl and etcd. The code that
// they share is linked once: one file of about 140 MB where the separate programs have 60 to 120 MB each.
//
// This folder is not a package of the module around it: kerf-cluster embeds the file and builds it in a module that
// it generates for the wanted Kubernetes version.
package main

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	_ "time/tzdata"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/embed"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var programs = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubectl":                 kubectl.NewDefaultKubectlCommand,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"etcd":                    etcdCommand,
}

func main() {
	name := filepath.Base(os.Args[0])
	program, known := programs[name]
	if !known {
		fmt.Fprintf(os.Stderr, "%q is not a program of Kubernetes: call this file through a link with a program's name\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(program()))
}

// etcdCommand is a single etcd member for tests: no peers, and no fsync, so that a slow disk does not slow a test. What
// it holds survives its own death, but not the machine's.
func etcdCommand() *cobra.Command {
	var dir, client string
	command := &cobra.Command{
		Use:          "etcd",
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE:         func(*cobra.Command, []string) error { return runEtcd(dir, client) },
	}
	command.Flags().StringVar(&dir, "data-dir", "", "folder of the data")
	command.Flags().StringVar(&client, "listen-client-url", "http://127.0.0.1:2379", "address for clients")
	return command
}

func runEtcd(dir, client string) error {
	listen, err := url.Parse(client)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	// The peers' side is a unix socket in the working directory: a single member has no peers and needs no port.
	if err := os.Chdir(dir); err != nil {
		return err
	}
	peer := url.URL{Scheme: "unix", Host: fmt.Sprintf("localhost:%d", os.Getpid())}
	config := embed.NewConfig()
	config.Dir = dir
	config.LogLevel = "warn"
	config.UnsafeNoFsync = true
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{*listen}, []url.URL{*listen}
	config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	config.InitialCluster = config.InitialClusterFromName(config.Name)

	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	server, err := embed.StartEtcd(config)
	if err != nil {
		return err
	}
	defer server.Close()
	select {
	case <-stop.Done():
		return nil
	case err := <-server.Err():
		return err
	}
}
