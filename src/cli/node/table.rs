//! The daemon's state as tables.

use crate::admin::table::{grid, one_line};
use crate::node::service::proto::MountedVolume;
use crate::node::{ContainerEntry, KeptMount, MountState, NodeState, PodEntry, PodOrigin, PodStage, VolumeEntry};

/// A line for each pod, followed by its problems and notes.
pub(super) fn pods(state: &NodeState) -> String {
    let row = |pod: &PodEntry| {
        let wanted = pod.volumes.iter().filter(|volume| volume.desired).count();
        let mounted = pod.volumes.iter().filter(|volume| volume.mount == MountState::Mounted).count();
        let source = match &pod.origin {
            Some(PodOrigin::File(path)) => path.display().to_string(),
            Some(PodOrigin::Api) => "API server".to_owned(),
            Some(PodOrigin::Kubelet) => "kubelet".to_owned(),
            Some(PodOrigin::Runtime) => "runtime".to_owned(),
            None => "-".to_owned(),
        };
        let volumes = format!("{mounted}/{}", wanted.max(mounted));
        let reasons =
            pod.volumes.iter().filter_map(|volume| Some(format!("{}: {}", volume.name, volume.reason.as_ref()?)));
        let remarks = pod.errors.iter().chain(&pod.notes).cloned().chain(reasons).map(|text| one_line(&text)).collect();
        ([pod.title(), word(pod).to_owned(), volumes, pod.uid.clone(), source], remarks)
    };
    let rows: Vec<_> = state.pods.values().map(|pod| row(pod)).collect();
    let mut text = head(state);
    match rows.as_slice() {
        [] => text += "the node has no pods\n",
        rows => text += &grid(["POD", "STATE", "MOUNTED", "UID", "SOURCE"], &[2], rows),
    }
    text
}

/// A line for each volume, followed by its problem.
pub(super) fn volumes(state: &NodeState) -> String {
    let row = |pod: &PodEntry, volume: &VolumeEntry| {
        let mount = match volume.mount {
            MountState::NotMounted => "no",
            MountState::Uncertain => "uncertain",
            MountState::Mounted => "yes",
        };
        let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
        let cells = [
            pod.title(),
            volume.name.clone(),
            yes(volume.desired),
            mount.to_owned(),
            yes(volume.remount_required),
            volume.unique_name.clone(),
        ];
        (cells, volume.reason.iter().map(|reason| one_line(reason)).collect())
    };
    let all = state.pods.values().flat_map(|pod| pod.volumes.iter().map(|volume| row(pod, volume)));
    let rows: Vec<_> = all.collect();
    let mut text = head(state);
    match rows.as_slice() {
        [] => text += "no volume is wanted or mounted\n",
        rows => text += &grid(["POD", "VOLUME", "WANTED", "MOUNTED", "REFRESH", "UNIQUE NAME"], &[], rows),
    }
    text + &containers(state)
}

/// A line for each container that the container runtime has created, followed by the reasons why it has volumes of the kubelet.
fn containers(state: &NodeState) -> String {
    let list = |paths: Vec<&str>| if paths.is_empty() { "-".to_owned() } else { one_line(&paths.join(", ")) };
    let row = |pod: &PodEntry, container: &ContainerEntry| {
        let replaced = list(container.replaced.iter().map(String::as_str).collect());
        let kept = list(container.kept.iter().map(|mount| mount.path.as_str()).collect());
        let remark = |mount: &KeptMount| Some(one_line(&format!("{}: {}", mount.path, mount.reason.as_ref()?)));
        ([pod.title(), container.name.clone(), replaced, kept], container.kept.iter().filter_map(remark).collect())
    };
    let all = state.pods.values().flat_map(|pod| pod.containers.iter().map(|container| row(pod, container)));
    match all.collect::<Vec<_>>().as_slice() {
        [] => String::new(),
        rows => "\n".to_owned() + &grid(["POD", "CONTAINER", "OF PODFS", "OF THE KUBELET"], &[], rows),
    }
}

/// A line for each mounted volume, with the path that an agent binds into containers.
pub(super) fn mounted(volumes: &[MountedVolume]) -> String {
    let row = |volume: &MountedVolume| {
        let access = if volume.read_only { "read-only" } else { "read-write" };
        let group = volume.supplemental_group.map_or_else(|| "-".to_owned(), |group| group.to_string());
        ([volume.name.clone(), volume.kind.clone(), access.to_owned(), group, volume.path.clone()], Vec::new())
    };
    match volumes {
        [] => "no volume of the pod is mounted\n".to_owned(),
        volumes => {
            grid(["VOLUME", "KIND", "ACCESS", "GROUP", "PATH"], &[3], &volumes.iter().map(row).collect::<Vec<_>>())
        }
    }
}

/// Whether the pod has all its volumes, or does not need them because it has ended or was deleted.
pub(super) fn has_needed_volumes(pod: &PodEntry) -> bool {
    word(pod) != "waiting"
}

/// The problems of the node as a whole.
fn head(state: &NodeState) -> String {
    let beginning = match (state.sources_ready, state.states_synced) {
        (true, true) => None,
        (false, _) => Some("not all sources have listed their pods yet; podfs unmounts nothing until then"),
        (true, false) => {
            Some("podfs does not know yet of all volumes of an earlier podfs node whether they are mounted")
        }
    };
    let trouble = state.trouble.iter().map(|text| one_line(text));
    let lines: Vec<_> = beginning.map(str::to_owned).into_iter().chain(trouble).collect();
    if lines.is_empty() { String::new() } else { lines.join("\n") + "\n\n" }
}

/// The state of a pod, in a word.
fn word(pod: &PodEntry) -> &'static str {
    let lacks = |volume: &VolumeEntry| volume.mount != MountState::Mounted;
    match pod.stage {
        _ if pod.released => "released",
        None if pod.is_unknown() => "unknown",
        None => "deleted",
        Some(PodStage::Terminal) => "ended",
        Some(PodStage::Terminating) => "terminating",
        Some(PodStage::Desired) if !pod.processed || pod.volumes.iter().any(lacks) => "waiting",
        Some(PodStage::Desired) => "mounted",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::manifest::pod::PodUid;

    fn volume(name: &str, mount: MountState, reason: Option<&str>) -> VolumeEntry {
        VolumeEntry {
            name: name.to_owned(),
            unique_name: format!("kubernetes.io/secret/u-{name}"),
            plugin: "kubernetes.io/secret".to_owned(),
            kind: "secret".to_owned(),
            desired: true,
            mount,
            path: None,
            read_only: true,
            selinux: None,
            group: None,
            attachable: Some(false),
            size: None,
            remount_required: false,
            reason: reason.map(str::to_owned),
        }
    }

    #[test]
    fn the_table_has_each_pod_and_its_missing_volumes() {
        let web = PodEntry {
            namespace: Some("default".to_owned()),
            name: Some("web".to_owned()),
            uid: "u".to_owned(),
            origin: Some(PodOrigin::Api),
            stage: Some(PodStage::Desired),
            released: false,
            processed: true,
            volumes: vec![
                volume("a", MountState::Mounted, None),
                volume("b", MountState::NotMounted, Some("secret \"b\"\nnot found")),
            ],
            errors: Vec::new(),
            notes: vec!["volume \"c\" stays".to_owned()],
            supervisor: None,
            containers: Vec::new(),
        };
        let gone = PodEntry {
            name: None,
            uid: "v".to_owned(),
            origin: None,
            stage: None,
            volumes: Vec::new(),
            notes: Vec::new(),
            ..web.clone()
        };
        assert!(!has_needed_volumes(&web) && has_needed_volumes(&gone));
        assert_eq!(word(&PodEntry { stage: None, ..web.clone() }), "unknown", "its source may have it");
        let by_uid = |pod: PodEntry| (PodUid::parse(&pod.uid).expect("a uid"), Arc::new(pod));
        let mut state = NodeState { pods: [web, gone].map(by_uid).into(), ..NodeState::default() };
        state.trouble = vec!["pods: forbidden".to_owned()];
        let expected = "\
not all sources have listed their pods yet; podfs unmounts nothing until then
pods: forbidden

  POD          STATE    MOUNTED  UID  SOURCE
  default/web  waiting      1/2  u    API server
    volume \"c\" stays
    b: secret \"b\" not found
  v            deleted      0/0  v    -
";
        assert_eq!(pods(&state), expected);
        (state.sources_ready, state.states_synced, state.trouble) = (true, true, Vec::new());
        let expected = "  \
  POD          VOLUME  WANTED  MOUNTED  REFRESH  UNIQUE NAME
  default/web  a       yes     yes      no       kubernetes.io/secret/u-a
  default/web  b       yes     no       no       kubernetes.io/secret/u-b
    secret \"b\" not found
";
        assert_eq!(volumes(&state), expected);
        let kept = vec![KeptMount { path: "/b".to_owned(), reason: Some("podfs is late".to_owned()) }];
        let of_podfs = ContainerEntry { name: "app".to_owned(), replaced: vec!["/a".to_owned()], ..Default::default() };
        let of_kubelet = ContainerEntry { name: "log".to_owned(), kept, ..Default::default() };
        let web = state.pods.values_mut().next().expect("web");
        Arc::make_mut(web).containers = vec![of_podfs, of_kubelet];
        let expected = expected.to_owned()
            + "
  POD          CONTAINER  OF PODFS  OF THE KUBELET
  default/web  app        /a        -
  default/web  log        -         /b
    /b: podfs is late
";
        assert_eq!(volumes(&state), expected);
        assert_eq!(
            pods(&NodeState { sources_ready: true, states_synced: true, ..NodeState::default() }),
            "the node has no pods\n"
        );
    }
}
