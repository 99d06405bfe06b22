use super::*;
use crate::node::feed::chosen::Choice;
use crate::node::publication::PublishedPod;
use crate::node::sample;
use crate::volume::{Volume, VolumeSource};

fn publication(volume: &str, needs_pod: bool) -> Publication {
    let pod = PublishedPod {
        uid: "u".to_owned(),
        namespace: "default".to_owned(),
        name: "p-u".to_owned(),
        service_account: String::new(),
    };
    let kind = json!({"configMap": {"name": volume}});
    let target = PathBuf::from(format!("/k/pods/u/{volume}/mount"));
    let mut publication = Publication::new(volume.to_owned(), target, pod, volume.to_owned(), kind);
    publication.needs_pod = needs_pod;
    publication.group = Some(7);
    publication
}

fn names(event: Option<FeedEvent>) -> Vec<String> {
    match event {
        Some(FeedEvent::Put(pod)) => {
            assert_eq!((pod.origin, pod.pod.facts.fs_group), (PodOrigin::Kubelet, Some(7)));
            pod.pod.volumes.iter().map(|volume| volume.name.to_string()).collect()
        }
        Some(FeedEvent::Gone(PodSource::Kubelet, uid)) => vec![format!("gone {uid}")],
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_pod_has_the_volumes_that_the_kubelet_wants_and_goes_with_the_last() {
    let mut pods = KubeletPods::default();
    let published = |publication: Publication| KubeletChange::Published(Box::new(publication));
    let FeedEvent::Pods(PodSource::Kubelet, none) = pods.publish(BTreeMap::new(), &[]) else {
        panic!("all pods come first")
    };
    assert!(none.is_empty());
    assert_eq!(names(pods.change(published(publication("a", false)))), ["a"]);
    assert_eq!(names(pods.change(published(publication("d", true)))), ["a"], "its pod is not known yet");
    let described = sample::pod("u", &["{name: other, emptyDir: {}}"], &["other"]);
    assert_eq!(names(pods.change_source(FeedEvent::Put(described)).pop()), ["a", "d"]);
    let neighbour = sample::pod("v", &["{name: other, emptyDir: {}}"], &["other"]);
    assert!(pods.change_source(FeedEvent::Put(neighbour)).is_empty(), "it has no publication");
    assert!(pods.change_source(FeedEvent::Gone(PodSource::Api, sample::uid("u"))).is_empty(), "its containers may run");
    assert_eq!(names(pods.change(KubeletChange::Unpublished(publication("a", false).target))), ["d"]);
    assert_eq!(names(pods.change(KubeletChange::Unpublished(publication("d", false).target))), ["gone u"]);
    assert!(pods.change(KubeletChange::Unpublished("/k/pods/u/a/mount".into())).is_none());
    let known: Vec<_> = pods.described.keys().cloned().collect();
    assert_eq!(
        (known, pods.gone.len()),
        (vec![sample::uid("v")], 0),
        "no source has u, and the kubelet has unpublished it"
    );
}

#[test]
fn a_pod_of_an_earlier_daemon_keeps_its_volumes_until_a_source_describes_it() {
    let both = || [publication("a", false), publication("d", true)].map(|one| (one.target.clone(), one)).into();
    let listed = |event: FeedEvent| {
        let FeedEvent::Pods(PodSource::Kubelet, pods) = event else { panic!("all pods come first: {event:?}") };
        pods.into_iter().flat_map(|pod| names(Some(FeedEvent::Put(pod)))).collect::<Vec<_>>()
    };
    let mut described = sample::pod("u", &[], &[]);
    Arc::make_mut(&mut described.manifest)["metadata"]["labels"] = json!({"tier": "front"});
    let mut first = KubeletPods::default();
    assert!(listed(first.publish(both(), &[])).is_empty(), "without a checkpoint, d may be mounted");
    let event = first.change_source(FeedEvent::Put(described)).pop();
    let Some(FeedEvent::Put(of_checkpoint)) = event else { panic!("{event:?}") };

    let mut next = KubeletPods::default();
    assert_eq!(listed(next.publish(both(), std::slice::from_ref(&of_checkpoint))), ["a", "d"]);
    let event = next.change(KubeletChange::Published(Box::new(publication("e", true))));
    let Some(FeedEvent::Put(pod)) = event else { panic!("{event:?}") };
    assert_eq!(pod.pod.volumes.len(), 3);
    assert_eq!(pod.manifest["metadata"]["labels"], json!({"tier": "front"}), "the last description counts");
    let changed = sample::pod("u", &[], &[]);
    let event = next.change_source(FeedEvent::Put(changed)).pop();
    let Some(FeedEvent::Put(pod)) = event else { panic!("{event:?}") };
    assert!(pod.manifest["metadata"]["labels"].is_null(), "the source's description counts from now on");

    let mut without_description = KubeletPods::default();
    let minimal = without_description.change(KubeletChange::Published(Box::new(publication("a", false))));
    let Some(FeedEvent::Put(of_checkpoint)) = minimal else { panic!("{minimal:?}") };
    let mut next = KubeletPods::default();
    assert_eq!(listed(next.publish(both(), &[of_checkpoint])), ["a"], "the earlier daemon did not know the pod either");
}

/// The pod `p-u` of a manifest file, as podfs reads it on the node `n1.Example`.
fn static_pod() -> NodePod {
    let mut pod = sample::pod("derived", &["{name: app, configMap: {name: app}}"], &["app"]);
    let parsed = Arc::make_mut(&mut pod.pod);
    parsed.identity.name = "p-u".to_owned();
    parsed.facts.node_name = Some("n1.Example".to_owned());
    Arc::make_mut(&mut pod.manifest)["metadata"]["name"] = json!("p-u");
    NodePod { origin: PodOrigin::File("/etc/kubernetes/manifests/p-u.yaml".into()), ..pod }
}

/// The name of the pod in the change, in its manifest and parsed, and how many volumes the pod has.
fn name_and_volumes(event: Option<FeedEvent>) -> (String, usize) {
    let Some(FeedEvent::Put(pod)) = event else { panic!("{event:?}") };
    assert_eq!(pod.manifest["metadata"]["name"], json!(pod.pod.identity.name));
    (pod.pod.identity.name.clone(), pod.pod.volumes.len())
}

#[test]
fn da_01_a_static_pod_has_the_name_that_the_kubelet_gives_it() {
    let at_kubelet = || {
        let mut publication = publication("d", true);
        publication.pod.name = "p-u-n1.example".to_owned();
        KubeletChange::Published(Box::new(publication))
    };
    let known = ("p-u-n1.example".to_owned(), 1);
    let mut pods = KubeletPods::default();
    assert_eq!(
        name_and_volumes(pods.change(at_kubelet())),
        ("p-u-n1.example".to_owned(), 0),
        "no file describes it yet"
    );
    assert_eq!(name_and_volumes(pods.change_source(FeedEvent::Put(static_pod())).pop()), known);
    let mut pods = KubeletPods::default();
    assert!(pods.change_source(FeedEvent::Put(static_pod())).is_empty());
    assert_eq!(name_and_volumes(pods.change(at_kubelet())), known, "the file was there first");
    let mut pods = KubeletPods::default();
    pods.change_source(FeedEvent::Put(static_pod()));
    let other = KubeletChange::Published(Box::new(publication("d", true)));
    assert_eq!(name_and_volumes(pods.change(other)), ("p-u".to_owned(), 0), "it is a pod of the API server");
}

#[test]
fn da_01_the_next_pod_of_a_manifest_file_has_the_fields_that_the_file_has_now() {
    let publication = |uid: &str| {
        let mut publication = publication("d", true);
        publication.pod.name = "p-u-n1.example".to_owned();
        publication.pod.uid = uid.to_owned();
        publication.target = PathBuf::from(format!("/{uid}/d"));
        publication
    };
    let labelled = |label: &str| {
        let mut pod = static_pod();
        Arc::make_mut(&mut pod.manifest)["metadata"]["labels"] = json!({"version": label});
        FeedEvent::Put(pod)
    };
    let label_of = |event: Option<FeedEvent>| {
        let Some(FeedEvent::Put(pod)) = event else { panic!("{event:?}") };
        pod.manifest["metadata"]["labels"]["version"].as_str().map(str::to_owned)
    };
    // The map of descriptions is in the order of uids: each of the two may come first.
    for (first, second) in [("a", "z"), ("z", "a")] {
        let mut pods = KubeletPods::default();
        pods.change_source(labelled("1"));
        let published = pods.change(KubeletChange::Published(Box::new(publication(first))));
        assert_eq!(label_of(published).as_deref(), Some("1"));
        assert_eq!(label_of(pods.change_source(labelled("2")).pop()).as_deref(), Some("2"));
        pods.change(KubeletChange::Unpublished(publication(first).target));
        let published = pods.change(KubeletChange::Published(Box::new(publication(second))));
        assert_eq!(label_of(published).as_deref(), Some("2"));
        pods.change_source(FeedEvent::Gone(PodSource::Files, static_pod().pod.identity.uid.clone()));
        pods.change(KubeletChange::Unpublished(publication(second).target));
        let published = pods.change(KubeletChange::Published(Box::new(publication("next"))));
        assert_eq!(label_of(published), None, "no file describes it any more");
    }
}

#[test]
fn da_01_a_static_pod_that_is_chosen_for_the_runtime_has_the_name_of_its_node() {
    let mut pods = KubeletPods::default();
    pods.choose(Chosen::new(Choice::All, []), &[]);
    let known = ("p-u-n1.example".to_owned(), 1);
    assert_eq!(name_and_volumes(pods.change_source(FeedEvent::Put(static_pod())).pop()), known);
    let mut of_unknown_node = static_pod();
    Arc::make_mut(&mut of_unknown_node.pod).facts.node_name = None;
    let written = ("p-u".to_owned(), 1);
    assert_eq!(name_and_volumes(pods.change_source(FeedEvent::Put(of_unknown_node)).pop()), written);
    let mut pods = KubeletPods::default();
    let earlier = NodePod { origin: PodOrigin::Runtime, ..static_pod() };
    let uid = earlier.pod.identity.uid.clone();
    pods.keep_names(std::slice::from_ref(&earlier));
    pods.choose(Chosen::new(Choice::All, [uid]), &[earlier]);
    assert_eq!(
        name_and_volumes(pods.change_source(FeedEvent::Put(static_pod())).pop()),
        written,
        "it runs with this name"
    );
}

#[test]
fn annotations_are_those_of_the_volumes_that_the_kubelet_wants() {
    let mut pods = KubeletPods::default();
    pods.publish(BTreeMap::new(), &[]);
    let mut described = sample::pod("u", &["{name: other, emptyDir: {}}"], &["other"]);
    Arc::make_mut(&mut described.manifest)["metadata"]["annotations"] = json!({
        "podfs.io/cache.other": "none", "podfs.io/sub-path.a": "live", "podfs.io/mount-options.share": "soft", "x": "y",
    });
    pods.change_source(FeedEvent::Put(described));
    let mut share = publication("share", false);
    share.volume = json!({"nfs": {"server": "nfs.example", "path": "/"}});
    share.mount_options = vec!["nolock".to_owned(), "ro".to_owned()];
    pods.change(KubeletChange::Published(Box::new(share)));
    let event = pods.change(KubeletChange::Published(Box::new(publication("a", false))));
    let Some(FeedEvent::Put(pod)) = event else { panic!("no annotation keeps a volume back: {event:?}") };
    assert_eq!(
        pod.manifest["metadata"]["annotations"],
        json!({"podfs.io/sub-path.a": "live", "podfs.io/mount-options.share": "nolock,ro", "x": "y"}),
    );
    assert_eq!(pod.pod.volumes.len(), 2);
}

#[test]
fn a_directory_of_the_node_has_the_directory_that_the_node_allows() {
    let mut pods = KubeletPods::default();
    pods.publish(BTreeMap::new(), &[]);
    let mut described = sample::pod("u", &["{name: other, emptyDir: {}}"], &["other"]);
    Arc::make_mut(&mut described.manifest)["metadata"]["annotations"] = json!({"podfs.io/within.earlier": "/"});
    pods.change_source(FeedEvent::Put(described));
    let at = |name: &str, within: Option<&str>| {
        let mut publication = publication(name, false);
        publication.volume = json!({"hostPath": {"path": "/srv/shared/x", "type": "Directory"}});
        publication.within = within.map(PathBuf::from);
        publication
    };
    pods.change(KubeletChange::Published(Box::new(at("earlier", None))));
    let event = pods.change(KubeletChange::Published(Box::new(at("new", Some("/srv/shared")))));
    let Some(FeedEvent::Put(pod)) = event else { panic!("{event:?}") };
    let within = |volume: &Volume| match &volume.source {
        VolumeSource::HostPath(source) => source.within.clone(),
        other => panic!("{other:?}"),
    };
    let within: Vec<_> = pod.pod.volumes.iter().map(within).collect();
    assert_eq!(within, [None, Some(PathBuf::from("/srv/shared"))], "the pod's user decides nothing");
}

#[test]
fn a_pod_of_an_earlier_daemon_waits_for_the_lists_of_all_sources() {
    let uid = sample::uid("u");
    let mut chosen = Chosen::new(Choice::All, [uid.clone()]);
    chosen.await_sources([PodSource::Files, PodSource::Api]);
    chosen.change(&RuntimeChange::Synchronized(BTreeMap::new()));
    let described = || sample::pod("u", &["{name: app, configMap: {name: app}}"], &["app"]);
    let mut pods = KubeletPods::default();
    pods.choose(chosen, &[described()]);
    let events = pods.change_source(FeedEvent::Pods(PodSource::Files, Vec::new()));
    let [FeedEvent::Pods(PodSource::Files, none)] = &events[..] else { panic!("it is no pod of a file: {events:?}") };
    assert!(none.is_empty());
    let events = pods.change_source(FeedEvent::Pods(PodSource::Api, Vec::new()));
    let [FeedEvent::Gone(PodSource::Runtime, gone), FeedEvent::Pods(PodSource::Api, _)] = &events[..] else {
        panic!("no source has it: {events:?}")
    };
    assert_eq!(*gone, uid);
}

#[test]
fn a_chosen_pod_has_its_payload_volumes_and_those_of_the_kubelet_and_goes_with_its_sandbox() {
    let mut pods = KubeletPods::default();
    let FeedEvent::Pods(PodSource::Runtime, none) = pods.choose(Chosen::new(Choice::All, []), &[]) else {
        panic!("all pods come first")
    };
    assert!(none.is_empty());
    pods.change_runtime(RuntimeChange::Synchronized(BTreeMap::new()));
    let volumes = ["{name: app, configMap: {name: app}}", "{name: data, emptyDir: {}}"];
    let described = sample::pod("u", &volumes, &["app", "data"]);
    let volumes_of = |event: Option<&FeedEvent>| match event {
        Some(FeedEvent::Put(pod)) => {
            let names = pod.pod.volumes.iter().map(|volume| volume.name.to_string()).collect::<Vec<_>>();
            (pod.origin.clone(), names)
        }
        other => panic!("{other:?}"),
    };
    let of_runtime = (PodOrigin::Runtime, vec!["app".to_owned()]);
    assert_eq!(volumes_of(pods.change_source(FeedEvent::Put(described)).first()), of_runtime);
    let published = pods.change(KubeletChange::Published(Box::new(publication("a", false))));
    let both = (PodOrigin::Runtime, vec!["app".to_owned(), "a".to_owned()]);
    assert_eq!(volumes_of(published.as_ref()), both);
    let unpublished = pods.change(KubeletChange::Unpublished(publication("a", false).target));
    assert_eq!(volumes_of(unpublished.as_ref()), of_runtime);
    let uid = sample::uid("u");
    pods.change_runtime(RuntimeChange::Started("s".to_owned(), uid.clone()));
    let Some(FeedEvent::Put(written_down)) = published else { panic!("it is there") };
    let mut next = KubeletPods::default();
    next.publish(BTreeMap::from([("/k/pods/u/a/mount".into(), publication("a", false))]), &[]);
    next.choose(Chosen::new(Choice::All, [uid.clone()]), &[written_down]);
    let FeedEvent::Pods(_, first) = next.published() else { panic!("all pods come first") };
    assert_eq!(volumes_of(first.into_iter().map(FeedEvent::Put).next().as_ref()), both, "another daemon goes on");
    let terminating = NodePod { stage: PodStage::Terminating, ..sample::pod("u", &volumes, &["app", "data"]) };
    assert_eq!(volumes_of(next.change_source(FeedEvent::Put(terminating)).first()), both, "it ends, and has not ended");
    let gone = pods.change_source(FeedEvent::Gone(PodSource::Api, uid.clone()));
    assert_eq!(volumes_of(gone.first()), of_runtime, "its sandbox runs");
    let ended = pods.change_runtime(RuntimeChange::Removed("s".to_owned()));
    assert!(matches!(&ended[..], [FeedEvent::Gone(PodSource::Runtime, gone)] if *gone == uid), "{ended:?}");
    assert!(pods.change_runtime(RuntimeChange::Removed("s".to_owned())).is_empty());
}
