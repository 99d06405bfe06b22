use super::*;
use crate::node::sample::uid;

fn id() -> VolumeId {
    VolumeId { pod: uid("u"), volume: "v".to_owned() }
}

fn mount_of(world: &ActualWorld) -> MountState {
    world.volume(&id()).map_or(MountState::NotMounted, |volume| volume.mount)
}

#[test]
fn vm_04_states_after_errors_are_those_of_the_kubelets_table() {
    use OperationOutcome::{Done, Final, Transient, Uncertain};
    // History of mounts; state afterwards.
    let rows: &[(&[OperationOutcome], MountState)] = &[
        (&[Uncertain], MountState::Uncertain),
        (&[Final], MountState::NotMounted),
        (&[Uncertain, Final], MountState::NotMounted),
        (&[Done, Uncertain], MountState::Mounted),
        (&[Done, Final], MountState::Mounted),
        (&[Uncertain, Transient], MountState::Uncertain),
        (&[Transient], MountState::NotMounted),
        (&[Done, Transient], MountState::Mounted),
        (&[Final, Done], MountState::Mounted),
    ];
    for (history, state) in rows {
        let mut world = ActualWorld::default();
        history.iter().for_each(|outcome| world.mounted(&id(), *outcome, Some("no".to_owned())));
        assert_eq!(mount_of(&world), *state, "{history:?}");
    }
}

#[test]
fn vm_08_a_failed_remount_leaves_the_volume_mounted_and_the_remount_required() {
    let mut world = ActualWorld::default();
    world.mounted(&id(), OperationOutcome::Done, None);
    world.require_remount(&uid("u"));
    world.mounted(&id(), OperationOutcome::Final, Some("configmap \"x\" not found".to_owned()));
    let volume = world.volume(&id()).expect("it is known");
    assert!(volume.mount == MountState::Mounted && volume.remount_required);
    assert_eq!(volume.reason(), Some("configmap \"x\" not found"));
    world.mounted(&id(), OperationOutcome::Done, None);
    let volume = world.volume(&id()).expect("it is known");
    assert!(!volume.remount_required && volume.reason().is_none());
}

#[test]
fn a_report_that_comes_before_the_end_of_the_mount_stays() {
    let mut world = ActualWorld::default();
    world.mounted(&id(), OperationOutcome::Transient, Some("its supervisor does not answer yet".to_owned()));
    let reported = "no token: it comes with the next NodePublishVolume";
    world.report(&id(), true, ObservedVolume::default(), Some(reported.to_owned()));
    world.mounted(&id(), OperationOutcome::Done, None);
    assert_eq!(world.volume(&id()).and_then(ActualVolume::reason), Some(reported));
}

#[test]
fn rc_04_a_reconstructed_volume_whose_mount_fails_can_still_be_unmounted() {
    let mut world = ActualWorld::default();
    world.reconstruct(id());
    world.mounted(&id(), OperationOutcome::Final, Some("no".to_owned()));
    assert_eq!(mount_of(&world), MountState::Uncertain);
    world.unmounted(&id(), OperationOutcome::Final, Some("busy".to_owned()));
    assert_eq!(mount_of(&world), MountState::Uncertain, "a failed unmount is tried again");
    world.unmounted(&id(), OperationOutcome::Done, None);
    assert!(world.volume(&id()).is_none());
}

#[test]
fn a_volume_that_its_supervisor_no_longer_has_is_not_mounted() {
    let mut world = ActualWorld::default();
    world.report(&id(), true, ObservedVolume::default(), None);
    assert_eq!(mount_of(&world), MountState::Mounted);
    world.report(&id(), false, ObservedVolume::default(), Some("its source".to_owned()));
    assert_eq!(mount_of(&world), MountState::NotMounted);
    world.forget_unmounted(|_| false);
    assert_eq!(world.volumes().count(), 0);
}

#[test]
fn a_reconstructed_volume_is_known_after_the_report_of_its_supervisor() {
    for is_mounted in [true, false] {
        let mut world = ActualWorld::default();
        world.reconstruct(id());
        world.report(&id(), is_mounted, ObservedVolume::default(), None);
        assert!(!world.volume(&id()).expect("it is there").reconstructed);
        assert_ne!(mount_of(&world), MountState::NotMounted, "it is to be unmounted");
    }
}
