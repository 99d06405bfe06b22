use super::*;
use crate::node::pod::PodOrigin;
use crate::node::sample;

fn pod(uid: &str, stage: PodStage) -> NodePod {
    NodePod { stage, ..sample::pod(uid, &["{name: a, emptyDir: {}}"], &["a"]) }
}

fn needs(pods: &Pods, uid: &str) -> bool {
    pods.get(&sample::uid(uid)).is_some_and(KnownPod::needs_volumes)
}

#[test]
fn vm_12_a_pod_that_is_being_deleted_is_served_only_if_it_was_served_before() {
    use PodStage::{Desired, Terminal, Terminating};
    // Whether an earlier daemon served it, its stage before, its stage now, whether podfs has to serve its volumes.
    let rows = [
        (true, None, Terminating, true),
        (true, None, Terminal, true),
        (false, None, Terminating, false),
        (false, None, Terminal, false),
        (false, Some(Desired), Terminating, true),
        (false, Some(Desired), Terminal, true),
    ];
    for (is_recovered, before, stage, expected) in rows {
        let mut pods = Pods::new([PodSource::Api], false);
        if is_recovered {
            pods.recover(pod("u", Desired), false);
        }
        match before {
            Some(before) => {
                pods.take_list(PodSource::Api, vec![pod("u", before)]);
                pods.put(pod("u", stage));
            }
            None => drop(pods.take_list(PodSource::Api, vec![pod("u", stage)])),
        }
        assert_eq!(needs(&pods, "u"), expected, "{is_recovered} {before:?} {stage:?}");
    }
}

#[test]
fn vm_11_volumes_of_a_pod_that_is_gone_stay_until_it_is_released() {
    let mut pods = Pods::new([PodSource::Api], false);
    pods.take_list(PodSource::Api, vec![pod("u", PodStage::Desired)]);
    let uid = sample::uid("u");
    let refused = pods.release(&uid).expect_err("it is to run").to_string();
    assert!(refused.starts_with("pod default/p-u is to run on this node"), "{refused}");
    pods.put(pod("u", PodStage::Terminating));
    pods.note_undescribed(&uid);
    assert!(needs(&pods, "u"), "its containers may still run");
    pods.release(&uid).expect("it is gone");
    assert!(!needs(&pods, "u"));
    assert_eq!(pods.release(&sample::uid("x")), Err(CommandError::Unknown("x".to_owned())));
}

#[test]
fn a_pod_is_released_without_an_agent_where_that_was_asked_for() {
    let mut pods = Pods::new([PodSource::Api], true);
    pods.take_list(PodSource::Api, vec![pod("u", PodStage::Desired), pod("v", PodStage::Desired)]);
    pods.put(pod("u", PodStage::Terminating));
    assert!(needs(&pods, "u"), "its containers are being stopped");
    pods.note_undescribed(&sample::uid("u"));
    pods.put(pod("v", PodStage::Terminal));
    assert!(!needs(&pods, "u") && !needs(&pods, "v"));
}

#[test]
fn rc_02_a_pod_of_an_earlier_daemon_stays_until_its_source_has_listed_its_pods_and_it_is_released() {
    let mut pods = Pods::new([PodSource::Files, PodSource::Api], false);
    pods.recover(pod("u", PodStage::Desired), false);
    pods.recover(pod("v", PodStage::Terminating), true);
    pods.take_list(PodSource::Files, vec![]);
    assert!(needs(&pods, "u") && !pods.sources_ready(), "the API server has not spoken");
    pods.take_list(PodSource::Api, vec![pod("v", PodStage::Terminating)]);
    assert!(pods.sources_ready() && needs(&pods, "u"), "it is not released");
    assert!(!needs(&pods, "v"), "it was released before the daemon was killed");
    pods.release(&sample::uid("u")).expect("its source does not have it");
    assert!(!needs(&pods, "u"));
}

#[test]
fn a_pod_that_comes_back_after_its_release_is_wanted_again() {
    let mut pods = Pods::new([PodSource::Api], false);
    pods.take_list(PodSource::Api, vec![pod("u", PodStage::Desired)]);
    pods.note_undescribed(&sample::uid("u"));
    pods.release(&sample::uid("u")).expect("it is gone");
    pods.put(pod("u", PodStage::Desired));
    assert!(needs(&pods, "u"));
    pods.note_undescribed(&sample::uid("u"));
    assert!(needs(&pods, "u"), "the release was of its earlier life");
}

#[test]
fn a_pod_whose_source_has_not_listed_its_pods_is_not_released() {
    let mut pods = Pods::new([PodSource::Files, PodSource::Api], false);
    pods.recover(pod("u", PodStage::Desired), false);
    let uid = sample::uid("u");
    pods.take_list(PodSource::Files, vec![]);
    assert!(pods.get(&uid).is_some_and(|known| pods.is_unlisted(known)));
    let refused = pods.release(&uid).expect_err("it may run").to_string();
    assert!(refused.starts_with("pod default/p-u: its source has not listed its pods yet"), "{refused}");
    pods.take_list(PodSource::Api, vec![]);
    assert!(pods.get(&uid).is_some_and(|known| !pods.is_unlisted(known)));
    pods.release(&uid).expect("its source does not have it");
}

#[test]
fn a_pod_of_a_source_that_the_daemon_no_longer_has_is_unknown_unless_the_api_server_lacks_it() {
    let of = |origin: PodOrigin| NodePod { origin, ..pod("u", PodStage::Desired) };
    let file = || PodOrigin::File("/etc/web.yaml".into());
    // The origin of the pod, the sources of the daemon, and whether the pod is unknown when all of them have listed their pods.
    let rows = [
        (PodOrigin::Runtime, vec![PodSource::Kubelet], true),
        (PodOrigin::Runtime, vec![PodSource::Files], true),
        (PodOrigin::Runtime, vec![PodSource::Api], false),
        (PodOrigin::Runtime, vec![PodSource::Runtime], false),
        (PodOrigin::Kubelet, vec![PodSource::Files], true),
        (file(), vec![PodSource::Api], true),
        (file(), vec![PodSource::Files], false),
    ];
    for (origin, sources, expected) in rows {
        let mut pods = Pods::new(sources.clone(), false);
        pods.recover(of(origin.clone()), false);
        let is_unknown = |pods: &Pods| pods.get(&sample::uid("u")).is_some_and(|known| pods.is_unknown(known));
        assert!(is_unknown(&pods), "{origin:?} {sources:?}: not all have listed");
        for source in &sources {
            pods.take_list(*source, vec![]);
        }
        assert_eq!(is_unknown(&pods), expected, "{origin:?} {sources:?}");
        pods.release(&sample::uid("u")).expect("an agent may release it");
    }
}

#[test]
fn a_pod_of_a_source_that_the_daemon_no_longer_has_is_gone_when_all_sources_are_ready() {
    let of_file = || NodePod { origin: PodOrigin::File("/etc/web.yaml".into()), ..pod("u", PodStage::Desired) };
    let mut pods = Pods::new([PodSource::Kubelet, PodSource::Api], true);
    pods.recover(of_file(), false);
    assert_eq!(pods.take_list(PodSource::Kubelet, vec![]), []);
    assert!(needs(&pods, "u"));
    assert_eq!(pods.release_unlisted(|_| true), []);
    assert_eq!(pods.take_list(PodSource::Api, vec![]), [sample::uid("u")]);
    assert_eq!(pods.release_unlisted(|_| false), []);
    assert!(needs(&pods, "u"), "its source may describe it later");
    assert_eq!(pods.release_unlisted(|_| true), [sample::uid("u")]);
    assert!(!needs(&pods, "u"));
    let mut without_sources = Pods::new([], true);
    without_sources.recover(of_file(), false);
    assert!(!needs(&without_sources, "u"));
}
