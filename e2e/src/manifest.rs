//! What users write: claims and pods, with as few words as a scenario needs.

use serde_json::{Value, json};

/// The image with a shell and a C library that `kerf-cluster` loads on each node.
const IMAGE: &str = "localhost/kerf-e2e:1";

/// What the containers of a scenario do: show their GPUs, then live until they are told to end.
const SHOW_AND_WAIT: &str = "trap 'exit 0' TERM; nvidia-smi -L; sleep 1000000 & wait";

/// One request of a claim.
#[derive(Clone, Debug)]
pub struct Request {
    name: String,
    body: Value,
}

impl Request {
    /// Any device of a class.
    pub fn class(name: &str, class: &str) -> Request {
        Request { name: name.to_owned(), body: json!({ "deviceClassName": class }) }
    }

    /// A partition of this profile.
    pub fn mig(name: &str, profile: &str) -> Request {
        Request::class(name, "mig.nvidia.com")
            .cel(&format!(r#"device.attributes["gpu.nvidia.com"].profile == "{profile}""#))
    }

    /// A whole GPU.
    pub fn gpu(name: &str) -> Request {
        Request::class(name, "gpu.nvidia.com")
    }

    /// Adds a CEL selector.
    pub fn cel(mut self, expression: &str) -> Request {
        let selector = json!({ "cel": { "expression": expression } });
        match self.body["selectors"].as_array_mut() {
            Some(selectors) => selectors.push(selector),
            None => self.body["selectors"] = json!([selector]),
        }
        self
    }

    /// More than one device.
    pub fn count(mut self, count: u32) -> Request {
        self.body["count"] = json!(count);
        self
    }

    fn exactly(&self) -> Value {
        json!({ "name": self.name, "exactly": self.body })
    }

    fn alternative(&self) -> Value {
        let mut body = self.body.clone();
        body["name"] = json!(self.name);
        body
    }
}

/// The spec of a claim.
#[derive(Clone, Debug)]
pub struct Claim {
    spec: Value,
}

impl Claim {
    /// A claim with these requests.
    pub fn of(requests: &[Request]) -> Claim {
        let requests: Vec<Value> = requests.iter().map(Request::exactly).collect();
        Claim { spec: json!({ "devices": { "requests": requests } }) }
    }

    /// A claim that takes the first of these that fits.
    pub fn first_available(name: &str, alternatives: &[Request]) -> Claim {
        let alternatives: Vec<Value> = alternatives.iter().map(Request::alternative).collect();
        Claim { spec: json!({ "devices": { "requests": [{ "name": name, "firstAvailable": alternatives }] } }) }
    }

    /// All devices of the claim must agree in this attribute.
    pub fn match_attribute(mut self, attribute: &str) -> Claim {
        self.spec["devices"]["constraints"] = json!([{ "matchAttribute": attribute }]);
        self
    }

    /// Adds an opaque configuration for kerf.
    pub fn config(mut self, parameters: &Value) -> Claim {
        self.spec["devices"]["config"] =
            json!([{ "opaque": { "driver": "gpu.nvidia.com", "parameters": parameters } }]);
        self
    }

    /// The claim as an object of its own.
    pub fn object(&self, name: &str) -> Value {
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": { "name": name },
            "spec": self.spec,
        })
    }

    /// The claim as a template.
    pub fn template(&self, name: &str) -> Value {
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": { "name": name },
            "spec": { "spec": self.spec },
        })
    }
}

/// A pod whose containers show their GPUs and wait.
#[derive(Clone, Debug)]
pub struct Pod {
    name: String,
    claim: Value,
    containers: Vec<Value>,
    image: Option<String>,
}

impl Pod {
    /// A pod that makes a claim of its own from a template.
    pub fn from_template(name: &str, template: &str) -> Pod {
        Pod::new(name, json!({ "name": "gpu", "resourceClaimTemplateName": template }))
    }

    /// A pod that uses a claim that exists.
    pub fn with_claim(name: &str, claim: &str) -> Pod {
        Pod::new(name, json!({ "name": "gpu", "resourceClaimName": claim }))
    }

    fn new(name: &str, claim: Value) -> Pod {
        Pod { name: name.to_owned(), claim, containers: Vec::new(), image: None }
    }

    /// Adds a container that gets the devices of one request of the claim.
    pub fn container(mut self, name: &str, request: &str) -> Pod {
        self.containers.push(container(name, &json!({ "name": "gpu", "request": request })));
        self
    }

    /// Its containers are of this image, which the node may have to pull.
    pub fn image(self, image: &str) -> Pod {
        Pod { image: Some(image.to_owned()), ..self }
    }

    /// The pod's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The object. Without containers of its own it has one, `main`, with all devices of the claim.
    pub fn object(&self) -> Value {
        let mut containers = match self.containers.as_slice() {
            [] => vec![container("main", &json!({ "name": "gpu" }))],
            containers => containers.to_vec(),
        };
        if let Some(image) = &self.image {
            for container in &mut containers {
                container["image"] = json!(image);
                container["imagePullPolicy"] = json!("IfNotPresent");
            }
        }
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": self.name },
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "restartPolicy": "Never",
                "resourceClaims": [self.claim],
                "containers": containers,
            },
        })
    }
}

fn container(name: &str, claim: &Value) -> Value {
    json!({
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", SHOW_AND_WAIT],
        "resources": { "claims": [claim] },
    })
}
