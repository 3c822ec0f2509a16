package main

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// archiveOf writes an archive that holds a blob and this index.json.
func archiveOf(t *testing.T, index string) string {
	t.Helper()
	var out tarball
	out.file("./blobs/sha256/0", 0o644, make([]byte, 70000))
	out.file("./index.json", 0o644, []byte(index))
	content, err := out.close()
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "x.tar")
	if err := os.WriteFile(archive, content, 0o644); err != nil {
		t.Fatal(err)
	}
	return archive
}

func TestAnArchiveTellsItsImages(t *testing.T) {
	own := filepath.Join(t.TempDir(), "own.tar")
	if err := (image{reference: "localhost/x:7"}).write(own); err != nil {
		t.Fatal(err)
	}
	if images, err := archiveImages(own); err != nil || len(images) != 1 || !strings.HasPrefix(images["localhost/x:7"], "sha256:") {
		t.Errorf("images %v, error %v", images, err)
	}
	// As buildah writes it: the full name in the annotation that also may hold a tag only.
	buildah := archiveOf(t, `{"schemaVersion":2,"manifests":[{"digest":"sha256:1","size":1,"annotations":{"org.opencontainers.image.ref.name":"localhost/y:dev"}}]}`)
	if images, err := archiveImages(buildah); err != nil || !maps.Equal(images, map[string]string{"localhost/y:dev": "sha256:1"}) {
		t.Errorf("images %v, error %v", images, err)
	}
	for index, want := range map[string]string{
		`{"manifests":[{"digest":"sha256:1","annotations":{"org.opencontainers.image.ref.name":"dev"}}]}`: "full name",
		`{"manifests":[{"digest":"sha256:1"}]}`:                                                           "full name",
		`[`:                                                                                               "cannot read index.json",
	} {
		if images, err := archiveImages(archiveOf(t, index)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("index %s gives %v, %v; want an error about %q", index, images, err, want)
		}
	}
	empty := filepath.Join(t.TempDir(), "empty.tar")
	if err := os.WriteFile(empty, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{empty: "no index.json", "loadimage_test.go": "no archive of an OCI image", "/nowhere.tar": "no image archive"} {
		if images, err := archiveImages(file); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s gives %v, %v; want an error about %q", file, images, err, want)
		}
	}
}

func TestOnlyTheSameDigestIsThereAlready(t *testing.T) {
	there := parseImageTable(`REF                     TYPE                                       DIGEST   SIZE     PLATFORMS   LABELS
localhost/x:7           application/vnd.oci.image.manifest.v1+json sha256:1 35.2 MiB linux/amd64 io.cri-containerd.image=managed
sha256:2                application/vnd.oci.image.manifest.v1+json sha256:1 35.2 MiB linux/amd64 io.cri-containerd.image=managed
localhost/y:dev         application/vnd.oci.image.manifest.v1+json sha256:3 1.0 MiB  linux/amd64 -
`)
	for name, c := range map[string]struct {
		archive map[string]string
		want    bool
	}{
		"both":         {map[string]string{"localhost/x:7": "sha256:1", "localhost/y:dev": "sha256:3"}, true},
		"other digest": {map[string]string{"localhost/x:7": "sha256:9"}, false},
		"other name":   {map[string]string{"localhost/z:7": "sha256:1"}, false},
		"one of two":   {map[string]string{"localhost/x:7": "sha256:1", "localhost/z:7": "sha256:1"}, false},
	} {
		if got := contains(there, c.archive); got != c.want {
			t.Errorf("%s: there already %v, want %v", name, got, c.want)
		}
	}
}
