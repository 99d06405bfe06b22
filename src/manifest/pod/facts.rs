//! Facts of a pod: the fields that its downwardAPI volumes show, and those that decide modes, owners and labels of its files.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PodSpec, SELinuxOptions, SecurityContext};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::container::{self, Container};
use super::resources::PodResources;
use crate::types::{InvalidField, numeric_id};

/// The service account of pods that name none: the API server's default, which podfs applies itself because a manifest
/// file need not have passed through an API server.
const DEFAULT_ACCOUNT: &str = "default";

/// The facts of a pod that its volumes need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodFacts {
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its annotations, as the manifest has them.
    pub annotations: BTreeMap<String, String>,
    /// Its regular containers.
    pub containers: Vec<Container>,
    /// Its init containers.
    pub init_containers: Vec<Container>,
    /// The group all volumes are shared with.
    pub fs_group: Option<u32>,
    /// When podfs gives the files of a volume to that group.
    pub fs_group_policy: FsGroupPolicy,
    /// The user as which all containers run, if the manifest gives each of them the same. The user of an image does not count.
    pub fs_user: Option<u32>,
    /// SELinux label of files that only the pod's containers may open.
    pub selinux_label: Option<String>,
    /// The service account that it acts as.
    pub service_account: String,
    /// Its containers run in a user namespace (`hostUsers: false`), so their volumes are mounted with the ids of that namespace.
    pub user_namespace: bool,
    /// The node it was scheduled to.
    pub node_name: Option<String>,
    /// The resources of the whole pod.
    pub resources: PodResources,
}

/// When podfs gives the files of a volume to the pod's group (`fsGroupChangePolicy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FsGroupPolicy {
    /// Each time it mounts the volume.
    #[default]
    Always,
    /// Only when the volume's root directory does not have the group and the mode for it yet.
    OnRootMismatch,
}

impl PodFacts {
    /// The facts of a volume that is served without its pod: none.
    pub fn placeholder() -> PodFacts {
        PodFacts { service_account: DEFAULT_ACCOUNT.to_owned(), ..PodFacts::default() }
    }

    /// The container of that name: a regular one, else an init container.
    pub fn container(&self, name: &str) -> Option<&Container> {
        self.containers.iter().chain(&self.init_containers).find(|container| container.name == name)
    }

    /// Parses a pod's spec. Errors are relative to it.
    pub(super) fn parse(metadata: ObjectMeta, spec: &PodSpec) -> Result<PodFacts, InvalidField> {
        let context = spec.security_context.as_ref();
        let regular = spec.containers.iter().map(|container| (container.name.as_str(), &container.resources));
        let init =
            spec.init_containers.iter().flatten().map(|container| (container.name.as_str(), &container.resources));
        let fs_group = context.and_then(|context| context.fs_group);
        let selinux = context.and_then(|context| context.se_linux_options.as_ref());
        let containers = container::containers("containers", regular)?;
        let init_containers = container::containers("initContainers", init)?;
        Ok(PodFacts {
            resources: PodResources::of(spec, &containers, &init_containers)?,
            labels: metadata.labels.unwrap_or_default(),
            annotations: metadata.annotations.unwrap_or_default(),
            containers,
            init_containers,
            fs_group: fs_group.map(|group| numeric_id("securityContext.fsGroup", group)).transpose()?,
            fs_group_policy: fs_group_policy(context.and_then(|context| context.fs_group_change_policy.as_deref()))?,
            fs_user: fs_user(spec)?,
            selinux_label: selinux.map(selinux_label).transpose()?,
            service_account: service_account(spec).to_owned(),
            user_namespace: spec.host_users == Some(false),
            node_name: spec.node_name.clone().filter(|name| !name.is_empty()),
        })
    }
}

/// The pod's service account, from the field `serviceAccountName` or from its older form `serviceAccount`.
fn service_account(spec: &PodSpec) -> &str {
    let given = [&spec.service_account_name, &spec.service_account].into_iter().flatten();
    given.map(String::as_str).find(|name| !name.is_empty()).unwrap_or(DEFAULT_ACCOUNT)
}

fn fs_group_policy(word: Option<&str>) -> Result<FsGroupPolicy, InvalidField> {
    match word {
        None | Some("" | "Always") => Ok(FsGroupPolicy::Always),
        Some("OnRootMismatch") => Ok(FsGroupPolicy::OnRootMismatch),
        Some(_) => Err(InvalidField::new("securityContext.fsGroupChangePolicy", "must be Always or OnRootMismatch")),
    }
}

/// The user as which all containers run, if each has one, from its security context or the pod's, and all are the same. Root
/// counts.
fn fs_user(spec: &PodSpec) -> Result<Option<u32>, InvalidField> {
    let of_pod = spec.security_context.as_ref().and_then(|context| context.run_as_user);
    let of_pod = of_pod.map(|user| numeric_id("securityContext.runAsUser", user)).transpose()?;
    let mut users = Vec::new();
    for (field, context) in security_contexts(spec) {
        let own = context.and_then(|context| context.run_as_user);
        let own = own.map(|user| numeric_id(&format!("{field}.securityContext.runAsUser"), user)).transpose()?;
        users.push(own.or(of_pod));
    }
    users.dedup();
    Ok(match users.as_slice() {
        [one] => *one,
        _ => None,
    })
}

/// The security context of each container, of all three kinds, with the container's field.
fn security_contexts(spec: &PodSpec) -> Vec<(String, Option<&SecurityContext>)> {
    fn listed<'a>(
        field: &'static str,
        contexts: impl Iterator<Item = &'a Option<SecurityContext>>,
    ) -> impl Iterator<Item = (String, Option<&'a SecurityContext>)> {
        contexts.enumerate().map(move |(index, context)| (format!("{field}[{index}]"), context.as_ref()))
    }
    let init = spec.init_containers.iter().flatten().map(|container| &container.security_context);
    let regular = spec.containers.iter().map(|container| &container.security_context);
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|container| &container.security_context);
    listed("initContainers", init)
        .chain(listed("containers", regular))
        .chain(listed("ephemeralContainers", ephemeral))
        .collect()
}

/// The SELinux label of the pod's files, with the user and the level in the manifest. The role and the type in the manifest are
/// for processes; podfs gives files those that the container runtime gives them.
fn selinux_label(options: &SELinuxOptions) -> Result<String, InvalidField> {
    let user = label_part("user", options.user.as_deref(), "system_u")?;
    let level = label_part("level", options.level.as_deref(), "s0")?;
    Ok(format!("{user}:object_r:container_file_t:{level}"))
}

fn label_part<'a>(field: &str, given: Option<&'a str>, default: &'a str) -> Result<&'a str, InvalidField> {
    let part = given.filter(|part| !part.is_empty()).unwrap_or(default);
    if part.bytes().all(|c| c.is_ascii_graphic() && c != b'"') {
        return Ok(part);
    }
    let sentence = "is no part of an SELinux label; a label has no spaces, quotes or control characters";
    Err(InvalidField::new(format!("securityContext.seLinuxOptions.{field}"), sentence))
}
