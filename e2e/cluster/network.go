package main

import (
	"fmt"
	"strings"
)

// The cluster's addresses. They exist only inside its namespaces, so all clusters use the same.
const (
	controlPlaneIP = "10.77.0.1"
	serviceRange   = "10.96.0.0/16"
	firstServiceIP = "10.96.0.1"
	podRange       = "10.88.0.0/16"
	maxNodes       = 32
)

// nodeNumber is a node's place in the list of nodes.
func (c *cluster) nodeNumber(node string) int {
	for i, name := range c.Nodes {
		if name == node {
			return i
		}
	}
	return -1
}

func nodeIP(number int) string    { return fmt.Sprintf("10.77.0.%d", 11+number) }
func podSubnet(number int) string { return fmt.Sprintf("10.88.%d.0/24", number) }

// makeNetwork joins the control plane and the nodes: a bridge in the control plane's namespace, with a veth pair to each
// node. Everyone has routes to every node's pods, and the control plane reaches Service addresses through the first node.
func (c *cluster) makeNetwork(control namespaces, nodes []namespaces) error {
	lines := []string{
		"link set lo up",
		"link add kerf0 type bridge",
		"address add " + controlPlaneIP + "/24 dev kerf0",
		"link set kerf0 up",
	}
	for i, node := range nodes {
		lines = append(lines,
			fmt.Sprintf("link add node%d type veth peer name eth0 netns %d", i, node.holder.PID),
			fmt.Sprintf("link set node%d master kerf0 up", i),
			fmt.Sprintf("route add %s via %s", podSubnet(i), nodeIP(i)))
	}
	if len(nodes) > 0 {
		lines = append(lines, fmt.Sprintf("route add %s via %s", serviceRange, nodeIP(0)))
	}
	if err := control.ipBatch(lines); err != nil {
		return err
	}
	for i, node := range nodes {
		lines := []string{
			"link set lo up",
			fmt.Sprintf("address add %s/24 dev eth0", nodeIP(i)),
			"link set eth0 up",
			"route add default via " + controlPlaneIP,
		}
		for other := range nodes {
			if other != i {
				lines = append(lines, fmt.Sprintf("route add %s via %s", podSubnet(other), nodeIP(other)))
			}
		}
		if err := node.ipBatch(lines); err != nil {
			return err
		}
	}
	for _, n := range append(nodes, control) {
		if err := n.runWith(strings.NewReader("1\n"), "tee", "/proc/sys/net/ipv4/ip_forward"); err != nil {
			return err
		}
	}
	return nil
}

// ipBatch runs commands of ip(8) inside. Routes through an address may be added before the other side exists.
func (n namespaces) ipBatch(lines []string) error {
	return n.runWith(strings.NewReader(strings.Join(lines, "\n")+"\n"), "ip", "-batch", "-")
}
