{{/*
What the schema cannot say in words that help: each check names the value, what is wrong and what would be right.
*/}}
{{- define "kerf.validate" -}}
{{- $v := .Values -}}
{{- include "kerf.validate.dnsName" (list "driverName" $v.driverName "gpu.nvidia.com" 63) -}}
{{- include "kerf.validate.dnsName" (list "deviceClasses.gpu" $v.deviceClasses.gpu "gpu.nvidia.com" 253) -}}
{{- include "kerf.validate.dnsName" (list "deviceClasses.mig" $v.deviceClasses.mig "mig.nvidia.com" 253) -}}
{{- if eq $v.deviceClasses.gpu $v.deviceClasses.mig -}}
  {{- fail (printf "deviceClasses.gpu and deviceClasses.mig are both %q: one is for whole GPUs, the other for MIG slices" $v.deviceClasses.gpu) -}}
{{- end -}}
{{- $resource := $v.deviceClasses.gpuResource -}}
{{- if and $resource (not (regexMatch "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$" $resource)) -}}
  {{- fail (printf "deviceClasses.gpuResource: %q is not the name of an extended resource, such as nvidia.com/gpu, or empty for none" $resource) -}}
{{- end -}}
{{- if and $v.driverRoot (ne $v.driverRoot "/") -}}
  {{- include "kerf.validate.path" (list "driverRoot" $v.driverRoot "/run/nvidia/driver, or empty to find it on each node") -}}
{{- end -}}
{{- include "kerf.validate.path" (list "kubeletRoot" $v.kubeletRoot "/var/lib/kubelet") -}}
{{- include "kerf.validate.path" (list "cdiRoot" $v.cdiRoot "/var/run/cdi") -}}
{{- include "kerf.validate.path" (list "hookRoot" $v.hookRoot "/var/lib/kerf") -}}
{{- /* Each is mounted, and no two at one path. */ -}}
{{- $hook := printf "%s/%s" $v.hookRoot $v.driverName -}}
{{- range $other := list (printf "%s/plugins/%s" $v.kubeletRoot $v.driverName) (printf "%s/plugins_registry" $v.kubeletRoot) $v.cdiRoot -}}
  {{- if eq $hook $other -}}
    {{- fail (printf "hookRoot: %s is for something else; choose a directory of its own, such as /var/lib/kerf" $other) -}}
  {{- end -}}
{{- end -}}
{{- if not (regexMatch "^([a-z0-9_:]+=)?(off|error|warn|info|debug|trace)(,([a-z0-9_:]+=)?(off|error|warn|info|debug|trace))*$" $v.logLevel) -}}
  {{- fail (printf "logLevel: %q is none of error, warn, info, debug, trace, nor a list such as info,kube=debug" $v.logLevel) -}}
{{- end -}}
{{- range $name, $image := dict "kubeletPlugin.image" $v.kubeletPlugin.image "controller.image" $v.controller.image -}}
  {{- if not (regexMatch "^[a-z0-9]([a-z0-9._/:-]*[a-z0-9])?$" $image.repository) -}}
    {{- fail (printf "%s.repository: %q is no name of an image, such as ghcr.io/kerf-dev/kerf-controller" $name $image.repository) -}}
  {{- end -}}
  {{- if regexMatch ":[^/]*$" $image.repository -}}
    {{- fail (printf "%s.repository: %q has a tag: give it as %s.tag" $name $image.repository $name) -}}
  {{- end -}}
  {{- if and $image.digest (not (regexMatch "^sha256:[0-9a-f]{64}$" $image.digest)) -}}
    {{- fail (printf "%s.digest: %q is no digest, which is sha256: and 64 hexadecimal digits" $name $image.digest) -}}
  {{- end -}}
{{- end -}}
{{- if and .Values.webhook.enabled (eq (int $v.webhook.port) 8080) -}}
  {{- fail "webhook.port: 8080 is the controller's own, for probes and metrics: take another, such as 8443" -}}
{{- end -}}
{{- if and .Values.webhook.enabled (gt (int $v.controller.replicas) 4) -}}
  {{- fail (printf "controller.replicas: %v with webhook.enabled, which allows 4: the API server trusts 8 certificates, and a controller that renews its own has two" $v.controller.replicas) -}}
{{- end -}}
{{- if and $v.layouts.configMap (not (regexMatch "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?/[a-z0-9]([a-z0-9.-]*[a-z0-9])?$" $v.layouts.configMap)) -}}
  {{- fail (printf "layouts.configMap: %q is not of the form namespace/name, such as gpu-operator/default-mig-parted-config, or empty for kerf-layouts in the release's namespace" $v.layouts.configMap) -}}
{{- end -}}
{{- if not (regexMatch "^([1-9][0-9]*|[1-9][0-9]?%|100%)$" (toString $v.kubeletPlugin.maxSurge)) -}}
  {{- fail (printf "kubeletPlugin.maxSurge: %v is neither a number of nodes, 1 or more, nor a percentage such as 10%%" $v.kubeletPlugin.maxSurge) -}}
{{- end -}}
{{- /*
sockaddr_un.sun_path has 108 bytes with the closing zero (unix(7)). The socket for registration has the longest path; where a
pod's UID does not fit into it, 8 digits stand for it.
*/ -}}
{{- $socket := printf "%s/plugins_registry/%s-00000000@reg.sock" $v.kubeletRoot $v.driverName -}}
{{- if gt (len $socket) 107 -}}
  {{- fail (printf "kubeletRoot %q and driverName %q are too long together: the socket between kubelet and plugin would have a path of %d bytes, and the kernel allows 107; choose a shorter driverName" $v.kubeletRoot $v.driverName (len $socket)) -}}
{{- end -}}
{{- if and (eq $v.nodes.discovery "NodeFeatureDiscovery") $v.kubeletPlugin.affinity.nodeAffinity -}}
  {{- fail "kubeletPlugin.affinity.nodeAffinity would replace the one of nodes.discovery NodeFeatureDiscovery: use kubeletPlugin.nodeSelector, or nodes.discovery All" -}}
{{- end -}}
{{- end -}}

{{/* Takes the value's name, the value, an example and the longest length. */}}
{{- define "kerf.validate.dnsName" -}}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$" (index . 1)) -}}
  {{- fail (printf "%s: %q is not a DNS name of lower-case letters, digits, '-' and '.', such as %s" (index . 0) (index . 1) (index . 2)) -}}
{{- end -}}
{{- if gt (len (index . 1)) (index . 3) -}}
  {{- fail (printf "%s: %q has %d characters, and Kubernetes allows %d" (index . 0) (index . 1) (len (index . 1)) (index . 3)) -}}
{{- end -}}
{{- end -}}

{{/* Takes the value's name, the value and an example. */}}
{{- define "kerf.validate.path" -}}
{{- if or (not (regexMatch "^(/[A-Za-z0-9._@+~-]+)+$" (index . 1))) (regexMatch "/\\.\\.?(/|$)" (index . 1)) -}}
  {{- fail (printf "%s: %q is not an absolute path without a slash at its end, such as %s" (index . 0) (index . 1) (index . 2)) -}}
{{- end -}}
{{- end -}}
