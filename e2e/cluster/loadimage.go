package main

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// archiveImages are the images of an OCI archive: the digest of each one's manifest, by the name that containerd gives it.
func archiveImages(archive string) (map[string]string, error) {
	file, err := os.Open(archive)
	if err != nil {
		return nil, fmt.Errorf("no image archive: %w", err)
	}
	defer file.Close()
	// The reader seeks over the blobs, wherever index.json stands among them.
	for reader := tar.NewReader(file); ; {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("%s is no archive of an OCI image: it holds no index.json", archive)
		}
		if err != nil {
			return nil, fmt.Errorf("%s is no archive of an OCI image: %w", archive, err)
		}
		if path.Clean(header.Name) != "index.json" {
			continue
		}
		var root index
		if err := json.NewDecoder(reader).Decode(&root); err != nil {
			return nil, fmt.Errorf("cannot read index.json of %s: %w", archive, err)
		}
		images := map[string]string{}
		for _, manifest := range root.Manifests {
			name := manifest.Annotations[imageNameAnnotation]
			if name == "" {
				name = manifest.Annotations[refNameAnnotation]
			}
			// A bare tag, as the OCI layout also allows, would get a repository name that tells nothing.
			if !strings.Contains(name, ":") {
				return nil, fmt.Errorf("%s does not say the image's full name: the annotation %s is %q", archive, refNameAnnotation, name)
			}
			images[name] = manifest.Digest
		}
		return images, nil
	}
}

// nodeImages are the images of a node's containerd, as archiveImages gives them.
func (c *cluster) nodeImages(built programs, node string) (map[string]string, error) {
	inside, err := c.enter(node)
	if err != nil {
		return nil, err
	}
	output, err := inside.command(c.ctr(built, node, "images", "ls")...).Output()
	if err != nil {
		return nil, fmt.Errorf("cannot list the images of %s: %w", node, err)
	}
	return parseImageTable(string(output)), nil
}

// parseImageTable reads the table of `ctr images ls`: reference, type and digest come first.
func parseImageTable(table string) map[string]string {
	images := map[string]string{}
	for line := range strings.Lines(table) {
		if columns := strings.Fields(line); len(columns) >= 3 && strings.HasPrefix(columns[2], "sha256:") {
			images[columns[0]] = columns[2]
		}
	}
	return images
}

// ctr is a command line that asks a node's containerd about the kubelet's images.
func (c *cluster) ctr(built programs, node string, args ...string) []string {
	return append([]string{filepath.Join(built.containerd, "ctr"), "--address=" + c.containerdSocket(node), "--namespace=k8s.io"}, args...)
}

// importImages brings archives into a node's containerd, where the kubelet finds them. What it holds already stays.
func (c *cluster) importImages(built programs, node string, archives []string) error {
	inside, err := c.enter(node)
	if err != nil {
		return err
	}
	there, err := c.nodeImages(built, node)
	if err != nil {
		return err
	}
	for _, archive := range archives {
		images, err := archiveImages(archive)
		if err != nil {
			return err
		}
		if contains(there, images) {
			continue
		}
		if err := inside.run(c.ctr(built, node, "images", "import", "--local", archive)...); err != nil {
			return fmt.Errorf("cannot import %s into %s: %w", archive, node, err)
		}
	}
	return nil
}

// contains reports whether all of part is in whole.
func contains(whole, part map[string]string) bool {
	for key, value := range part {
		if whole[key] != value {
			return false
		}
	}
	return true
}

func cmdLoadImage(args []string) error {
	set, name := flagSet("load-image")
	node := set.String("node", "", "")
	words, rest, err := parse(set, args)
	if err != nil {
		return err
	}
	if err := checkMachine(); err != nil {
		return err
	}
	c, err := loadCluster(*name)
	if err != nil {
		return err
	}
	built, err := c.builtPrograms()
	if err != nil {
		return err
	}
	nodes, err := c.nodesNamed(*node)
	if err != nil {
		return err
	}
	archives := append(words, rest...)
	for i, archive := range archives {
		if archives[i], err = filepath.Abs(archive); err != nil {
			return err
		}
	}
	if len(archives) == 0 {
		if archives, err = c.writeTestImages(built); err != nil {
			return err
		}
	}
	for _, node := range nodes {
		if err := c.importImages(built, node, archives); err != nil {
			return err
		}
	}
	return nil
}
