package main

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// component is one program of the cluster: of the control plane when node is empty.
type component struct {
	name, node string
}

// The components in the order in which they start.
var (
	controlPlaneComponents = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}
	nodeComponents         = []string{"containerd", "kubelet", "kube-proxy"}
)

// key names the component's record, log and override.
func (p component) key() string { return componentKey(p.name, p.node) }

func componentKey(name, node string) string {
	if node == "" {
		return name
	}
	return name + "@" + node
}

// String names the component for people.
func (p component) String() string {
	if p.node == "" {
		return p.name
	}
	return p.name + " of " + p.node
}

// takesGates reports whether the component is a part of Kubernetes.
func (p component) takesGates() bool { return p.name != "etcd" && p.name != "containerd" }

// components lists all of the cluster's.
func (c *cluster) components() []component {
	var all []component
	for _, name := range controlPlaneComponents {
		all = append(all, component{name, ""})
	}
	for _, node := range c.Nodes {
		for _, name := range nodeComponents {
			all = append(all, component{name, node})
		}
	}
	return all
}

// choose finds the components that a name and an optional node mean.
func (c *cluster) choose(name, node string) ([]component, error) {
	if _, err := c.nodesNamed(node); err != nil {
		return nil, err
	}
	var chosen []component
	for _, p := range c.components() {
		if p.name == name && (node == "" || p.node == node) {
			chosen = append(chosen, p)
		}
	}
	switch {
	case len(chosen) > 0:
		return chosen, nil
	case node != "" && slices.Contains(controlPlaneComponents, name):
		return nil, usageError("%s belongs to the control plane, not to a node: leave --node out", name)
	case slices.Contains(nodeComponents, name):
		return nil, usageError("the cluster has no node, and so no %s", name)
	}
	return nil, usageError("unknown component %q", name)
}

// effective are the gates, runtime configuration and extra flags that a component starts with.
func (c *cluster) effective(p component) override {
	e := c.Overrides[p.key()]
	if e.Gates == nil {
		e.Gates = c.Gates
	}
	if e.RuntimeConfig == nil {
		e.RuntimeConfig = c.RuntimeConfig
	}
	return e
}

// plan is how a component is started.
type plan struct {
	// files to write first, by path.
	files map[string]string
	// command to run in the component's namespaces, and what its environment has beside the tool's.
	command     []string
	environment []string
	// ready returns nil once the component does its work.
	ready func(ctx context.Context) error
}

// plan finds out how a component is started.
func (c *cluster) plan(p component, built programs, inside namespaces) (plan, error) {
	if p.node == "" {
		return c.planControlPlane(p, built, inside)
	}
	return c.planNode(p, built, inside)
}

// stopPatience is how long a component may take to end after SIGTERM. The API server waits for its clients to end their
// watches, which they do not; every component can be ended hard.
const stopPatience = 5 * time.Second

// patience is how long a component may take until it is ready; the machine may be busy with builds.
const patience = 3 * time.Minute

// begin starts a component without waiting for it; a component that runs already is left alone.
func (c *cluster) begin(p component, built programs) (wait func() error, err error) {
	inside, err := c.enter(p.node)
	if err != nil {
		return nil, err
	}
	how, err := c.plan(p, built, inside)
	if err != nil {
		return nil, err
	}
	running, err := c.recorded(p.key())
	if err != nil {
		return nil, err
	}
	if !running.alive() {
		for path, content := range how.files {
			if err := writeFile(path, []byte(content), 0o644); err != nil {
				return nil, err
			}
		}
		command := inside.command(how.command...)
		command.Dir = "/"
		command.Env = append(os.Environ(), "PATH="+built.path())
		command.Env = append(command.Env, how.environment...)
		if running, err = c.launch(p.key(), command); err != nil {
			return nil, err
		}
	}
	return func() error {
		return waitUntil(p.String()+" to be ready", patience, func(ctx context.Context) error {
			if !running.alive() {
				log := c.path("log", p.key()+".log")
				return fatalError{fmt.Errorf("%s ended; the end of %s:\n%s", p, log, lastLines(log))}
			}
			return how.ready(ctx)
		})
	}, nil
}

// start starts components and waits until all are ready.
func (c *cluster) start(built programs, parts ...component) error {
	var waits []func() error
	for _, p := range parts {
		wait, err := c.begin(p, built)
		if err != nil {
			return err
		}
		waits = append(waits, wait)
	}
	for _, wait := range waits {
		if err := wait(); err != nil {
			return err
		}
	}
	return nil
}

// stop asks a component to end. containerd leaves its containers running, as it does on a real node.
func (c *cluster) stop(p component) error {
	running, err := c.recorded(p.key())
	if err != nil {
		return err
	}
	return running.end(stopPatience)
}

// fatalError ends a wait: it will not get better.
type fatalError struct{ error }

// waitUntil tries until try succeeds; the error tells what the last try said.
func waitUntil(what string, patience time.Duration, try func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	reported := time.Now()
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		if fatal, ok := err.(fatalError); ok {
			return fatal.error
		}
		if time.Since(reported) > reportEvery {
			say("waiting for %s: %s", what, oneLine(err))
			reported = time.Now()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waited %s for %s; the last try said: %w", patience, what, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// oneLine is the beginning of an error, on one line.
func oneLine(err error) string {
	return fmt.Sprintf("%.120s", strings.Join(strings.Fields(err.Error()), " "))
}

// path is the PATH inside a cluster: its own programs first.
func (built programs) path() string {
	return strings.Join([]string{built.kubernetes + "/bin", built.containerd, built.helm, os.Getenv("PATH")}, ":")
}

// cmdComponent starts, stops, kills or restarts components.
func cmdComponent(verb string, args []string) error {
	set, name := flagSet(verb)
	node := set.String("node", "", "")
	gates := set.String("feature-gates", "", "")
	runtimeConfig := set.String("runtime-config", "", "")
	words, flags, err := parse(set, args)
	if err != nil {
		return err
	}
	if len(words) != 1 {
		return usageError("%s takes one component, not %q", verb, words)
	}
	c, unlock, err := holdCluster(*name)
	if err != nil {
		return err
	}
	defer unlock()
	parts, err := c.choose(words[0], *node)
	if err != nil {
		return err
	}
	starts := verb == "start" || verb == "restart"
	changed := isSet(set, "feature-gates") || isSet(set, "runtime-config") || flags != nil
	if changed && !starts {
		return usageError("%s takes no gates and no flags: give them to start", verb)
	}
	if changed {
		if err := c.change(parts, set, *gates, *runtimeConfig, flags); err != nil {
			return err
		}
	}
	if err := c.endAll(verb, parts); err != nil {
		return err
	}
	if !starts {
		return nil
	}
	built, err := c.builtPrograms()
	if err != nil {
		return err
	}
	return c.start(built, parts...)
}

// endAll does the stopping half of a verb.
func (c *cluster) endAll(verb string, parts []component) error {
	for _, p := range parts {
		running, err := c.recorded(p.key())
		if err != nil {
			return err
		}
		switch verb {
		case "start":
			if running.alive() {
				return fmt.Errorf("%s runs already (pid %d): use restart", p, running.PID)
			}
		case "kill":
			err = running.kill()
		default:
			err = c.stop(p)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// change records what the user wants changed for components.
func (c *cluster) change(parts []component, set *flag.FlagSet, gates, runtimeConfig string, flags []string) error {
	v, err := c.version()
	if err != nil {
		return err
	}
	overrides := maps.Clone(c.Overrides)
	if overrides == nil {
		overrides = map[string]override{}
	}
	for _, p := range parts {
		change, now := overrides[p.key()], c.effective(p)
		if isSet(set, "feature-gates") {
			if !p.takesGates() {
				return usageError("%s has no feature gates", p.name)
			}
			if change.Gates, err = changeGates(now.Gates, gates, v); err != nil {
				return err
			}
		}
		if isSet(set, "runtime-config") {
			if p.name != "kube-apiserver" {
				return usageError("only kube-apiserver has a runtime configuration")
			}
			if change.RuntimeConfig, err = parseRuntimeConfig(runtimeConfig); err != nil {
				return err
			}
		}
		if p.name == "kube-apiserver" && (change.Gates != nil || change.RuntimeConfig != nil) {
			if change.RuntimeConfig == nil {
				change.RuntimeConfig = now.RuntimeConfig
			}
			effective := change.Gates
			if effective == nil {
				effective = now.Gates
			}
			change.RuntimeConfig = withNeededAPIs(change.RuntimeConfig, effective, v)
		}
		if flags != nil {
			change.Flags = flags
		}
		overrides[p.key()] = change
	}
	c.Overrides = overrides
	return c.save()
}
