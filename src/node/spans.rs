//! The spans of the daemon's log, with the pod and the volume of a line. JSON lines have them as fields.
//!
//! 1. A span has the level error, so that `--log` never hides the span of a line that it shows.
//! 2. A span has no parent: a line is about one pod, also if an event of another pod caused it.

use tracing::{Span, error_span, field};

use crate::manifest::pod::{PodIdentity, PodUid};
use crate::supervisor::status::PodStatus;

/// The span of lines about a known pod.
pub(super) fn of_pod(pod: &PodIdentity) -> Span {
    of_uid(&pod.uid, Some(pod))
}

/// The span of lines about the pod with this uid. Its name may come later ([`set_pod`]).
pub(super) fn of_uid(uid: &PodUid, pod: Option<&PodIdentity>) -> Span {
    error_span!(parent: None, "pod", pod = pod.map(field::display), %uid)
}

/// The span of lines about a volume of the pod with this uid.
pub(super) fn of_volume(uid: &PodUid, pod: Option<&PodIdentity>, volume: &str) -> Span {
    error_span!(parent: None, "volume", pod = pod.map(field::display), %uid, volume)
}

/// The span of lines about a pod of which only the status is known.
pub(super) fn of_status(status: &PodStatus) -> Span {
    let name = status.namespace.as_deref().zip(status.name.as_deref());
    let pod = name.map(|(namespace, name)| format!("{namespace}/{name}"));
    error_span!(parent: None, "pod", pod, uid = status.uid)
}

/// The span of lines about a call of a kubelet, before its volume is known ([`set_volume`]).
pub(super) fn of_call() -> Span {
    error_span!(parent: None, "call", pod = field::Empty, uid = field::Empty, volume = field::Empty)
}

/// Adds a volume to the current span, which has no volume yet.
pub(super) fn set_volume(pod: &PodIdentity, volume: &str) {
    let span = Span::current();
    span.record("pod", field::display(pod));
    span.record("uid", field::display(&pod.uid));
    span.record("volume", volume);
}

/// Adds the name of the pod to the current span, which has no name yet.
pub(super) fn set_pod(namespace: &str, name: &str) {
    Span::current().record("pod", field::display(format_args!("{namespace}/{name}")));
}
