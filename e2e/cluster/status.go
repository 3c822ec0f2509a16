package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
)

// report is what `status --json` prints. Programs read it: fields are added, never renamed or removed.
type report struct {
	Name       string `json:"name"`
	Directory  string `json:"directory"`
	Kubernetes string `json:"kubernetes"`
	Containerd string `json:"containerd"`
	// Up: every component runs.
	Up         bool   `json:"up"`
	Kubeconfig string `json:"kubeconfig"`
	// Gates and RuntimeConfig are the cluster's; a component's own may differ after a restart with others.
	Gates         switches          `json:"gates"`
	RuntimeConfig switches          `json:"runtimeConfig"`
	Components    []componentReport `json:"components"`
	Nodes         []nodeReport      `json:"nodes"`
}

type nodeReport struct {
	Name string `json:"name"`
	IP   string `json:"ip"`
	// The node's folders and socket, as the machine and all namespaces see them.
	Directory        string            `json:"directory"`
	KubeletRoot      string            `json:"kubeletRoot"`
	CDIRoot          string            `json:"cdiRoot"`
	HookRoot         string            `json:"hookRoot"`
	ContainerdSocket string            `json:"containerdSocket"`
	PodSubnet        string            `json:"podSubnet"`
	Components       []componentReport `json:"components"`
}

type componentReport struct {
	Name    string `json:"name"`
	Running bool   `json:"running"`
	// PID of the running process, or of the last one; 0 when there was none.
	PID      int    `json:"pid"`
	RSSBytes uint64 `json:"rssBytes"`
	Log      string `json:"log"`
	// Gates are what the component starts with; null for those that have none.
	Gates switches `json:"gates"`
}

func cmdStatus(args []string) error {
	set, name := flagSet("status")
	asJSON := set.Bool("json", false, "")
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
	r, err := c.report()
	if err != nil {
		return err
	}
	if *asJSON {
		text, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return err
		}
		fmt.Println(string(text))
		return nil
	}
	return r.print()
}

// report gathers what is recorded and what runs.
func (c *cluster) report() (report, error) {
	r := report{
		Name: c.name, Directory: c.dir, Kubernetes: c.Kubernetes, Containerd: containerdVersion, Up: true,
		Kubeconfig: c.kubeconfig("admin"), Gates: c.Gates, RuntimeConfig: c.RuntimeConfig, Nodes: []nodeReport{},
	}
	for i, node := range c.Nodes {
		r.Nodes = append(r.Nodes, nodeReport{
			Name: node, IP: nodeIP(i), Directory: c.path(node), KubeletRoot: c.kubeletRoot(node), CDIRoot: c.cdiRoot(node),
			HookRoot:         c.hookRoot(node),
			ContainerdSocket: c.containerdSocket(node), PodSubnet: podSubnet(i),
		})
	}
	for _, p := range c.components() {
		running, err := c.recorded(p.key())
		if err != nil {
			return report{}, err
		}
		one := componentReport{
			Name: p.name, Running: running.alive(), PID: running.PID, RSSBytes: running.residentBytes(),
			Log: c.path("log", p.key()+".log"),
		}
		if p.takesGates() {
			one.Gates = c.effective(p).Gates
		}
		r.Up = r.Up && one.Running
		if p.node == "" {
			r.Components = append(r.Components, one)
			continue
		}
		at := &r.Nodes[c.nodeNumber(p.node)]
		at.Components = append(at.Components, one)
	}
	return r, nil
}

// difference tells in which gates a component differs from the cluster; one that takes no gates differs in none.
func difference(own, cluster switches) string {
	if own == nil {
		return ""
	}
	var items []string
	for name := range cluster {
		if _, set := own[name]; !set {
			items = append(items, name+" not set")
		}
	}
	for name, value := range own {
		if cluster[name] != value {
			items = append(items, name+"="+value)
		}
	}
	slices.Sort(items)
	return strings.Join(items, ", ")
}

// print writes the report for people.
func (r report) print() error {
	fmt.Printf("cluster %s: Kubernetes %s, kubeconfig %s\n", r.Name, r.Kubernetes, r.Kubeconfig)
	if len(r.Gates) > 0 {
		fmt.Printf("feature gates: %s\n", r.Gates)
	}
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "NODE\tCOMPONENT\tPID\tMEMORY\tGATES OF ITS OWN")
	var total uint64
	rows := func(node string, components []componentReport) {
		for _, one := range components {
			state, memory := "not running", ""
			if one.Running {
				state, memory = fmt.Sprint(one.PID), fmt.Sprintf("%d MiB", one.RSSBytes>>20)
			}
			total += one.RSSBytes
			fmt.Fprintf(out, "%s\t%s\t%s\t%s\t%s\n", node, one.Name, state, memory, difference(one.Gates, r.Gates))
		}
	}
	rows("-", r.Components)
	for _, node := range r.Nodes {
		rows(node.Name, node.Components)
	}
	fmt.Fprintf(out, "\tall\t\t%d MiB\t\n", total>>20)
	return out.Flush()
}
