package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
)

// unpack reads a tar archive: content by name, and headers by name.
func unpack(t *testing.T, archive []byte) (map[string][]byte, map[string]*tar.Header) {
	t.Helper()
	contents, headers := map[string][]byte{}, map[string]*tar.Header{}
	for reader := tar.NewReader(bytes.NewReader(archive)); ; {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return contents, headers
		}
		if err != nil {
			t.Fatal(err)
		}
		if headers[header.Name] != nil {
			t.Errorf("%s is in the archive twice", header.Name)
		}
		content, err := io.ReadAll(reader)
		if err != nil {
			t.Fatal(err)
		}
		contents[header.Name], headers[header.Name] = content, header
	}
}

func decode[T any](t *testing.T, content []byte) T {
	t.Helper()
	var value T
	if err := json.Unmarshal(content, &value); err != nil {
		t.Fatalf("%v in %s", err, content)
	}
	return value
}

func TestImageIsAnOCILayout(t *testing.T) {
	i := image{reference: "localhost/x:7", entrypoint: []string{"/bin/run"}, entries: []entry{
		{path: "/tmp", mode: 0o777 | os.ModeSticky},
		{path: "/bin/run", mode: 0o755, content: []byte("program")},
		{path: "/bin/sh", target: "run"},
		{path: "/etc/empty", mode: 0o644, content: []byte{}},
	}}
	archive := filepath.Join(t.TempDir(), "x.tar")
	if err := i.write(archive); err != nil {
		t.Fatal(err)
	}
	first, err := os.ReadFile(archive)
	if err != nil {
		t.Fatal(err)
	}
	files, _ := unpack(t, first)
	if got := string(files["oci-layout"]); got != `{"imageLayoutVersion":"1.0.0"}` {
		t.Errorf("oci-layout is %s", got)
	}
	blob := func(d descriptor) []byte {
		content, there := files["blobs/sha256/"+d.Digest[len("sha256:"):]]
		if digest := fmt.Sprintf("sha256:%x", sha256.Sum256(content)); !there || digest != d.Digest || len(content) != d.Size {
			t.Fatalf("blob %+v: there %v, digest %s, %d bytes", d, there, digest, len(content))
		}
		return content
	}
	root := decode[index](t, files["index.json"])
	if len(root.Manifests) != 1 || root.Manifests[0].Annotations["io.containerd.image.name"] != i.reference {
		t.Fatalf("index %+v", root)
	}
	m := decode[manifest](t, blob(root.Manifests[0]))
	config := decode[imageConfig](t, blob(m.Config))
	if len(m.Layers) != 1 || len(config.RootFS.DiffIDs) != 1 || config.RootFS.DiffIDs[0] != m.Layers[0].Digest || config.Config.Entrypoint[0] != "/bin/run" || config.OS != "linux" {
		t.Fatalf("manifest %+v, config %+v", m, config)
	}

	contents, headers := unpack(t, blob(m.Layers[0]))
	for name, want := range map[string]struct {
		kind byte
		mode int64
		more string
	}{
		"tmp/":      {tar.TypeDir, 0o1777, ""},
		"bin/":      {tar.TypeDir, 0o755, ""},
		"bin/run":   {tar.TypeReg, 0o755, "program"},
		"bin/sh":    {tar.TypeSymlink, 0o777, "run"},
		"etc/":      {tar.TypeDir, 0o755, ""},
		"etc/empty": {tar.TypeReg, 0o644, ""},
	} {
		h := headers[name]
		if h == nil || h.Typeflag != want.kind || h.Mode != want.mode || string(contents[name])+h.Linkname != want.more {
			t.Errorf("%s: header %+v, content %q; want %+v", name, h, contents[name], want)
		}
		delete(headers, name)
	}
	if len(headers) > 0 {
		t.Errorf("the layer has more: %v", sortedKeys(headers))
	}

	if err := i.write(archive); err != nil {
		t.Fatal(err)
	}
	if again, err := os.ReadFile(archive); err != nil || !bytes.Equal(first, again) {
		t.Errorf("the same image gives other bytes (error %v)", err)
	}
}
