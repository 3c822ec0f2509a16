package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"time"
)

// identity is a certificate that a component presents.
type identity struct {
	// file is the base name of <file>.crt and <file>.key in the pki folder.
	file string
	// user and groups are what Kubernetes reads from the certificate (common name, organisations).
	user   string
	groups []string
	// names and addresses that it serves under.
	names     []string
	addresses []string
	// kubeconfig: whether a kubeconfig with this identity is written beside it.
	kubeconfig bool
}

// certificateLife is the life of all certificates: longer than any test cluster's.
const certificateLife = 10 * 365 * 24 * time.Hour

// kubeletIdentity is the base name of a node's files.
func kubeletIdentity(node string) string { return "kubelet-" + node }

func (c *cluster) identities() []identity {
	all := []identity{
		{file: "apiserver", user: "kube-apiserver",
			names:     []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"},
			addresses: []string{"127.0.0.1", controlPlaneIP, firstServiceIP}},
		{file: "admin", user: "admin", groups: []string{"system:masters"}, kubeconfig: true},
		{file: "apiserver-kubelet-client", user: "kube-apiserver-kubelet-client", groups: []string{"system:masters"}},
		{file: "front-proxy", user: "front-proxy"},
		{file: "kube-controller-manager", user: "system:kube-controller-manager", kubeconfig: true},
		{file: "kube-scheduler", user: "system:kube-scheduler", kubeconfig: true},
		{file: "kube-proxy", user: "system:kube-proxy", kubeconfig: true},
	}
	for i, node := range c.Nodes {
		all = append(all, identity{file: kubeletIdentity(node), user: "system:node:" + node, groups: []string{"system:nodes"},
			names: []string{node}, addresses: []string{nodeIP(i)}, kubeconfig: true})
	}
	return all
}

// makePKI makes the certificate authority, the key for service account tokens and every identity, unless a complete set is
// there already.
func (c *cluster) makePKI() error {
	marker := c.path("pki", "complete")
	if _, err := os.Stat(marker); err == nil {
		return nil
	}
	authority, err := c.makeAuthority()
	if err != nil {
		return fmt.Errorf("cannot make the certificate authority: %w", err)
	}
	if err := c.makeTokenKey(); err != nil {
		return fmt.Errorf("cannot make the service account key: %w", err)
	}
	for i, id := range c.identities() {
		if err := c.makeIdentity(authority, int64(i)+2, id); err != nil {
			return fmt.Errorf("cannot make the certificate of %s: %w", id.user, err)
		}
	}
	return writeFile(marker, nil, 0o644)
}

// authority signs certificates.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func (c *cluster) makeAuthority() (authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return authority{}, err
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "kubernetes"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(certificateLife),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return authority{}, err
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return authority{}, err
	}
	return authority{certificate, key}, c.writePair("ca", der, key)
}

func (c *cluster) makeTokenKey() error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	if err := c.writePEM("service-account.pub", "PUBLIC KEY", public); err != nil {
		return err
	}
	return c.writeKey("service-account.key", key)
}

func (c *cluster) makeIdentity(by authority, serial int64, id identity) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial),
		Subject:      pkix.Name{CommonName: id.user, Organization: id.groups},
		NotBefore:    by.certificate.NotBefore,
		NotAfter:     by.certificate.NotAfter,
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:     id.names,
	}
	for _, address := range id.addresses {
		template.IPAddresses = append(template.IPAddresses, net.ParseIP(address))
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by.certificate, key.Public(), by.key)
	if err != nil {
		return err
	}
	if err := c.writePair(id.file, der, key); err != nil || !id.kubeconfig {
		return err
	}
	return c.writeKubeconfig(id.file)
}

func (c *cluster) writePair(file string, certificate []byte, key crypto.PrivateKey) error {
	if err := c.writePEM(file+".crt", "CERTIFICATE", certificate); err != nil {
		return err
	}
	return c.writeKey(file+".key", key)
}

func (c *cluster) writeKey(file string, key crypto.PrivateKey) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return c.writePEM(file, "PRIVATE KEY", der)
}

func (c *cluster) writePEM(file, kind string, der []byte) error {
	return writeFile(c.path("pki", file), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

// kubeconfig is the admin's; everyone else's lies in the pki folder.
func (c *cluster) kubeconfig(file string) string {
	if file == "admin" {
		return c.path("kubeconfig")
	}
	return c.path("pki", file+".kubeconfig")
}

// writeKubeconfig writes a kubeconfig that holds its certificates, so that it can be copied.
func (c *cluster) writeKubeconfig(file string) error {
	data := map[string]string{}
	for _, name := range []string{"ca.crt", file + ".crt", file + ".key"} {
		content, err := os.ReadFile(c.path("pki", name))
		if err != nil {
			return err
		}
		data[name] = base64.StdEncoding.EncodeToString(content)
	}
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- name: %[1]s
  cluster:
    server: https://%[2]s:6443
    certificate-authority-data: %[3]s
users:
- name: %[4]s
  user:
    client-certificate-data: %[5]s
    client-key-data: %[6]s
contexts:
- name: %[1]s
  context: {cluster: %[1]s, user: %[4]s}
current-context: %[1]s
`, "kerf-"+c.name, controlPlaneIP, data["ca.crt"], file, data[file+".crt"], data[file+".key"])
	return writeFile(c.kubeconfig(file), []byte(text), 0o600)
}
