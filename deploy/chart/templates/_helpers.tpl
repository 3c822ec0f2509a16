{{/* Names are made of these. 40 characters leave room for what follows in names that may have 63. */}}
{{- define "kerf.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kerf.fullname" -}}
{{- $name := include "kerf.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* By which objects of this release find each other; of a DaemonSet and a Deployment they can never change. */}}
{{- define "kerf.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kerf.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kerf.labels" -}}
{{ include "kerf.selectorLabels" . }}
app.kubernetes.io/part-of: kerf
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The user that a ServiceAccount is to the API server. Takes the root and the account's component. */}}
{{- define "kerf.user" -}}
{{- $root := index . 0 -}}
{{- printf "system:serviceaccount:%s:%s-%s" $root.Release.Namespace (include "kerf.fullname" $root) (index . 1) -}}
{{- end -}}

{{/* The ConfigMap with the layouts, as namespace/name. */}}
{{- define "kerf.layouts" -}}
{{- default (printf "%s/kerf-layouts" .Release.Namespace) .Values.layouts.configMap -}}
{{- end -}}

{{/* Reference of an image. Takes the root and the image's values. */}}
{{- define "kerf.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Labels and annotations of a program's pods. Takes the root, the component and its values. */}}
{{- define "kerf.podMetadata" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
{{- with $values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
labels:
  {{- include "kerf.selectorLabels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
  app.kubernetes.io/part-of: kerf
  {{- with $root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "kerf.probes" -}}
# What it waits for is in the answer, and in the pod's events.
readinessProbe:
  httpGet:
    path: /readyz
    port: http
  periodSeconds: 5
livenessProbe:
  httpGet:
    path: /healthz
    port: http
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}
