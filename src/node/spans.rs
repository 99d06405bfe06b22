//! The spans of the daemon's log: they name the pod, and the volume, that a line is about. JSON lines have them as fields.
//!
//! 1. They are spans of an error, so that `--log` lets them through wherever it lets a line through.
//! 2. They have no parent: a line is about one pod, also if the work for it began with an event of another.

use tracing::{Span, error_span, field};

use crate::manifest::pod::{PodIdentity, PodUid};
use crate::supervisor::status::PodStatus;

/// Lines about a pod that the daemon knows.
pub(super) fn of_pod(pod: &PodIdentity) -> Span {
    of_uid(&pod.uid, Some(pod))
}

/// Lines about the pod with this uid. Its name may come later ([`set_pod`]).
pub(super) fn of_uid(uid: &PodUid, pod: Option<&PodIdentity>) -> Span {
    error_span!(parent: None, "pod", pod = pod.map(field::display), %uid)
}

/// Lines about a volume of the pod with this uid.
pub(super) fn of_volume(uid: &PodUid, pod: Option<&PodIdentity>, volume: &str) -> Span {
    error_span!(parent: None, "volume", pod = pod.map(field::display), %uid, volume)
}

/// Lines about a pod of which only its status is at hand.
pub(super) fn of_status(status: &PodStatus) -> Span {
    let name = status.namespace.as_deref().zip(status.name.as_deref());
    let pod = name.map(|(namespace, name)| format!("{namespace}/{name}"));
    error_span!(parent: None, "pod", pod, uid = status.uid)
}

/// Lines about a call of a kubelet, which says only later what it is about ([`set_volume`]).
pub(super) fn of_call() -> Span {
    error_span!(parent: None, "call", pod = field::Empty, uid = field::Empty, volume = field::Empty)
}

/// The volume that the current span is about, which was made without it.
pub(super) fn set_volume(pod: &PodIdentity, volume: &str) {
    let span = Span::current();
    span.record("pod", field::display(pod));
    span.record("uid", field::display(&pod.uid));
    span.record("volume", volume);
}

/// The name of the pod of the current span, which was made without it.
pub(super) fn set_pod(namespace: &str, name: &str) {
    Span::current().record("pod", field::display(format_args!("{namespace}/{name}")));
}
