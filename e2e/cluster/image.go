package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
)

// image is a container image of one layer, made from files of this machine.
type image struct {
	// reference is the full name with its tag, such as localhost/kerf-pause:1.
	reference  string
	entrypoint []string
	entries    []entry
}

// entry is a file, folder or symbolic link of an image. Its parent folders are made by themselves.
type entry struct {
	path string
	mode os.FileMode
	// content of a file; a link has a target, and a folder has neither.
	content []byte
	target  string
}

// hostFile is an entry with the content of a file of this machine.
func hostFile(inImage, onHost string) (entry, error) {
	content, err := os.ReadFile(onHost)
	return entry{path: inImage, mode: 0o755, content: content}, err
}

// The types of the OCI image layout (github.com/opencontainers/image-spec) as far as an image of one layer needs them.
type (
	descriptor struct {
		MediaType   string            `json:"mediaType"`
		Digest      string            `json:"digest"`
		Size        int               `json:"size"`
		Platform    *platform         `json:"platform,omitempty"`
		Annotations map[string]string `json:"annotations,omitempty"`
	}
	platform struct {
		Architecture string `json:"architecture"`
		OS           string `json:"os"`
	}
	manifest struct {
		SchemaVersion int          `json:"schemaVersion"`
		MediaType     string       `json:"mediaType"`
		Config        descriptor   `json:"config"`
		Layers        []descriptor `json:"layers"`
	}
	index struct {
		SchemaVersion int          `json:"schemaVersion"`
		MediaType     string       `json:"mediaType"`
		Manifests     []descriptor `json:"manifests"`
	}
	imageConfig struct {
		platform
		Config struct {
			Env        []string `json:"Env"`
			Entrypoint []string `json:"Entrypoint,omitempty"`
		} `json:"config"`
		RootFS struct {
			Type    string   `json:"type"`
			DiffIDs []string `json:"diff_ids"`
		} `json:"rootfs"`
	}
)

const (
	indexType    = "application/vnd.oci.image.index.v1+json"
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar"
)

// The annotations that name an image of a layout: containerd's own, and that of the layout, which may be a tag only.
const (
	imageNameAnnotation = "io.containerd.image.name"
	refNameAnnotation   = "org.opencontainers.image.ref.name"
)

// write makes an archive of the OCI image layout, as containerd imports it. Equal images give equal bytes.
func (i image) write(archive string) error {
	layer, err := i.layer()
	if err != nil {
		return err
	}
	blobs := map[string][]byte{}
	add := func(mediaType string, content []byte) descriptor {
		digest := fmt.Sprintf("%x", sha256.Sum256(content))
		blobs[digest] = content
		return descriptor{MediaType: mediaType, Digest: "sha256:" + digest, Size: len(content)}
	}
	addJSON := func(mediaType string, value any) descriptor {
		content, err := json.Marshal(value)
		if err != nil {
			panic(err) // plain structs of strings and numbers always marshal
		}
		return add(mediaType, content)
	}
	here := platform{runtime.GOARCH, "linux"}
	layerIs := add(layerType, layer)
	config := imageConfig{platform: here}
	config.Config.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	config.Config.Entrypoint = i.entrypoint
	config.RootFS.Type, config.RootFS.DiffIDs = "layers", []string{layerIs.Digest}
	manifestIs := addJSON(manifestType, manifest{2, manifestType, addJSON(configType, config), []descriptor{layerIs}})
	manifestIs.Platform = &here
	manifestIs.Annotations = map[string]string{
		imageNameAnnotation: i.reference,
		refNameAnnotation:   i.reference[strings.LastIndex(i.reference, ":")+1:],
	}
	root := addJSON(indexType, index{2, indexType, []descriptor{manifestIs}})

	var out tarball
	out.file("oci-layout", 0o644, []byte(`{"imageLayoutVersion":"1.0.0"}`))
	rootBlob := strings.TrimPrefix(root.Digest, "sha256:")
	out.file("index.json", 0o644, blobs[rootBlob])
	delete(blobs, rootBlob)
	for _, digest := range sortedKeys(blobs) {
		out.file("blobs/sha256/"+digest, 0o644, blobs[digest])
	}
	content, err := out.close()
	if err != nil {
		return err
	}
	return writeFile(archive, content, 0o644)
}

// layer is the image's file system as a tar archive.
func (i image) layer() ([]byte, error) {
	var out tarball
	made := map[string]bool{}
	var folders func(name string)
	folders = func(name string) {
		if name == "." || name == "/" || made[name] {
			return
		}
		made[name] = true
		folders(path.Dir(name))
		out.folder(name, 0o755)
	}
	for _, e := range i.entries {
		name := strings.TrimPrefix(path.Clean("/"+e.path), "/")
		folders(path.Dir(name))
		switch {
		case e.target != "":
			out.link(name, e.target)
		case e.content != nil:
			out.file(name, e.mode, e.content)
		case !made[name]:
			made[name] = true
			out.folder(name, e.mode)
		}
	}
	return out.close()
}

// tarball writes a tar archive into memory and remembers the first error.
type tarball struct {
	buffer bytes.Buffer
	writer *tar.Writer
	err    error
}

func (t *tarball) file(name string, mode os.FileMode, content []byte) {
	t.add(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: tarMode(mode), Size: int64(len(content))}, content)
}

func (t *tarball) folder(name string, mode os.FileMode) {
	t.add(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: tarMode(mode)}, nil)
}

func (t *tarball) link(name, target string) {
	t.add(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, nil)
}

func (t *tarball) add(header *tar.Header, content []byte) {
	if t.writer == nil {
		t.writer = tar.NewWriter(&t.buffer)
	}
	if t.err == nil {
		t.err = t.writer.WriteHeader(header)
	}
	if t.err == nil {
		_, t.err = t.writer.Write(content)
	}
}

func (t *tarball) close() ([]byte, error) {
	if t.err == nil && t.writer != nil {
		t.err = t.writer.Close()
	}
	return t.buffer.Bytes(), t.err
}

// tarMode is a file mode as tar writes it; Go keeps the sticky bit elsewhere.
func tarMode(mode os.FileMode) int64 {
	bits := int64(mode.Perm())
	if mode&os.ModeSticky != 0 {
		bits |= 0o1000
	}
	return bits
}

// resolveLibrary finds a shared library by its name in the usual folders of this machine.
func resolveLibrary(name string) (string, error) {
	var patterns []string
	for _, base := range []string{"/lib", "/usr/lib"} {
		patterns = append(patterns, filepath.Join(base, "*-linux-gnu", name), filepath.Join(base+"64", name), filepath.Join(base, name))
	}
	for _, pattern := range patterns {
		if found, err := filepath.Glob(pattern); err == nil && len(found) > 0 {
			return found[0], nil
		}
	}
	return "", fmt.Errorf("library %s is not on this machine: run `apt-get install -y libc6 libgcc-s1`", name)
}
