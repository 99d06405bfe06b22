//! The reconciler, in single cases and against a model of a node.

use proptest::prelude::*;

use super::*;
use crate::manifest::pod::PodUid;
use crate::node::plugin::PluginRegistry;
use crate::node::sample;
use crate::node::world::actual::{ObservedVolume, OperationOutcome};

const VOLUMES: [&str; 2] = ["{name: a, configMap: {name: x}}", "{name: b, emptyDir: {}}"];

fn id(pod: &str, volume: &str) -> VolumeId {
    VolumeId { pod: sample::uid(pod), volume: volume.to_owned() }
}

fn desired(pods: &[(&str, &[&str])]) -> DesiredWorld {
    let mut desired = DesiredWorld::default();
    pods.iter().for_each(|(uid, used)| {
        desired.put(sample::pod(uid, &VOLUMES, used), &PluginRegistry::built_in(), &ActualWorld::default())
    });
    desired
}

fn mounted(ids: &[VolumeId]) -> ActualWorld {
    let mut actual = ActualWorld::default();
    ids.iter().for_each(|id| actual.report(id, true, ObservedVolume::default(), None));
    actual
}

#[test]
fn vm_01_unmounts_come_before_mounts() {
    let operations = reconcile(&desired(&[("z", &["a"])]), &mounted(&[id("a", "b")]), &BTreeSet::new(), true);
    let actions: Vec<_> = operations.iter().map(|operation| operation.action).collect();
    assert_eq!(actions, [Action::Unmount, Action::Mount]);
}

#[test]
fn vm_02_nothing_is_unmounted_before_every_source_is_ready() {
    let (desired, actual) = (desired(&[("z", &["a"])]), mounted(&[id("a", "b")]));
    let operations = reconcile(&desired, &actual, &BTreeSet::new(), false);
    assert_eq!(operations, [Operation { id: id("z", "a"), action: Action::Mount }]);
}

#[test]
fn vm_06_a_volume_with_a_running_operation_is_left_alone() {
    let (desired, actual) = (desired(&[("z", &["a", "b"])]), mounted(&[id("y", "a")]));
    let pending = BTreeSet::from([id("z", "a"), id("y", "a")]);
    let operations = reconcile(&desired, &actual, &pending, true);
    assert_eq!(operations, [Operation { id: id("z", "b"), action: Action::Mount }]);
}

#[test]
fn a_mounted_volume_is_set_up_again_only_when_that_is_required() {
    let desired = desired(&[("z", &["a"])]);
    let mut actual = mounted(&[id("z", "a")]);
    assert_eq!(reconcile(&desired, &actual, &BTreeSet::new(), true), []);
    actual.require_remount(&sample::uid("z"));
    let remount = Operation { id: id("z", "a"), action: Action::Remount };
    assert_eq!(reconcile(&desired, &actual, &BTreeSet::new(), true), [remount]);
}

#[test]
fn vm_13_a_volume_of_one_pod_is_unmounted_while_another_pod_uses_the_same_name() {
    let operations =
        reconcile(&desired(&[("y", &["a"])]), &mounted(&[id("y", "a"), id("z", "a")]), &BTreeSet::new(), true);
    assert_eq!(operations, [Operation { id: id("z", "a"), action: Action::Unmount }]);
}

/// A step of the model.
#[derive(Clone, Debug)]
enum ModelStep {
    /// The pod wants these of its volumes, or none and is gone.
    Want(usize, Vec<usize>),
    /// The running operation of this number ends like this.
    End(usize, OperationOutcome),
    /// An agent asks to set up the pod's volumes again.
    Remount(usize),
    /// The sources have listed their pods.
    Ready,
    /// The daemon is killed: the next one forgets the running operations, and reconstructs the volumes that are there.
    Restart,
}

fn step() -> impl Strategy<Value = ModelStep> {
    let outcome = prop_oneof![
        Just(OperationOutcome::Done),
        Just(OperationOutcome::Final),
        Just(OperationOutcome::Uncertain),
        Just(OperationOutcome::Transient),
    ];
    prop_oneof![
        4 => (0..3usize, proptest::collection::vec(0..2usize, 0..=2)).prop_map(|(pod, used)| ModelStep::Want(pod, used)),
        8 => (0..6usize, outcome).prop_map(|(number, outcome)| ModelStep::End(number, outcome)),
        1 => (0..3usize).prop_map(ModelStep::Remount),
        2 => Just(ModelStep::Ready),
        1 => Just(ModelStep::Restart),
    ]
}

const PODS: [&str; 3] = ["x", "y", "z"];

/// The real state of a node, beside the state that the manager knows.
#[derive(Default)]
struct Model {
    desired: DesiredWorld,
    actual: ActualWorld,
    running: Vec<Operation>,
    ready: bool,
    /// The volumes that are really mounted, wholly or in part.
    really_mounted: BTreeSet<VolumeId>,
}

impl Model {
    fn take(&mut self, step: ModelStep) {
        match step {
            ModelStep::Want(pod, used) if used.is_empty() => self.desired.remove(&sample::uid(PODS[pod])),
            ModelStep::Want(pod, used) => {
                let names: Vec<_> = used.iter().map(|volume| ["a", "b"][*volume]).collect();
                self.desired.put(sample::pod(PODS[pod], &VOLUMES, &names), &PluginRegistry::built_in(), &self.actual);
            }
            ModelStep::End(number, outcome) if number < self.running.len() => self.end(number, outcome),
            ModelStep::End(..) => {}
            ModelStep::Remount(pod) => self.actual.require_remount(&sample::uid(PODS[pod])),
            ModelStep::Ready => self.ready = true,
            ModelStep::Restart => {
                self.running.clear();
                self.ready = false;
                self.actual = ActualWorld::default();
                self.really_mounted.iter().for_each(|id| self.actual.reconstruct(id.clone()));
            }
        }
        self.actual.forget_unmounted(|id| self.desired.volume(id).is_some());
    }

    fn end(&mut self, number: usize, outcome: OperationOutcome) {
        let Operation { id, action } = self.running.remove(number);
        let was_mounted = self.actual.volume(&id).is_some_and(|volume| volume.mount == MountState::Mounted);
        match (action, outcome) {
            (Action::Unmount, OperationOutcome::Done) => drop(self.really_mounted.remove(&id)),
            (Action::Unmount, _) => {}
            (_, OperationOutcome::Done | OperationOutcome::Uncertain) => drop(self.really_mounted.insert(id.clone())),
            // A mount that failed for good has undone what it made, unless the volume was there before.
            (_, OperationOutcome::Final) if !was_mounted => {
                let reconstructed = self.actual.volume(&id).is_some_and(|volume| volume.reconstructed);
                if !reconstructed {
                    self.really_mounted.remove(&id);
                }
            }
            _ => {}
        }
        match action {
            Action::Unmount => self.actual.unmounted(&id, outcome, None),
            Action::Mount | Action::Remount => self.actual.mounted(&id, outcome, None),
        }
    }

    /// A pass of the reconciler, and checks of its operations.
    fn reconcile(&mut self) {
        let pending: BTreeSet<_> = self.running.iter().map(|operation| operation.id.clone()).collect();
        let operations = reconcile(&self.desired, &self.actual, &pending, self.ready);
        let mut seen = pending;
        for operation in &operations {
            let is_wanted = self.desired.volume(&operation.id).is_some();
            match operation.action {
                Action::Unmount => assert!(self.ready && !is_wanted, "{operation:?} of a volume that is wanted"),
                Action::Mount | Action::Remount => assert!(is_wanted, "{operation:?} of a volume that no pod wants"),
            }
            assert!(seen.insert(operation.id.clone()), "{operation:?} beside another operation of the volume");
        }
        self.running.extend(operations);
    }

    /// Every volume that is mounted is known: otherwise it would never be unmounted.
    fn check(&self) {
        for id in &self.really_mounted {
            let known = self.actual.volume(id).is_some_and(|volume| volume.mount != MountState::NotMounted);
            let running = self.running.iter().any(|operation| operation.id == *id);
            assert!(known || running, "{id} is mounted and unknown");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// VM-01 to VM-06: the reconciler never unmounts a wanted volume, never mounts an unwanted one, and never runs two operations
    /// for one volume. Once operations succeed, it comes to an end at which exactly the wanted volumes are mounted.
    #[test]
    fn the_reconciler_converges_and_never_does_what_it_must_not(steps in proptest::collection::vec(step(), 0..60)) {
        let mut model = Model::default();
        for step in steps {
            model.take(step);
            model.reconcile();
            model.check();
        }
        model.take(ModelStep::Ready);
        for _ in 0..20 {
            model.reconcile();
            while !model.running.is_empty() {
                model.end(0, OperationOutcome::Done);
            }
        }
        let wanted: BTreeSet<_> = model.desired.volumes().map(|(id, _)| id).collect();
        prop_assert_eq!(&model.really_mounted, &wanted);
        let mounted = model.actual.volumes().filter(|(_, volume)| volume.mount == MountState::Mounted);
        prop_assert_eq!(mounted.map(|(id, _)| id.clone()).collect::<BTreeSet<_>>(), wanted);
        let pods: Vec<PodUid> = model.desired.pods().map(|(uid, _)| uid.clone()).collect();
        prop_assert!(pods.len() <= PODS.len());
    }
}
