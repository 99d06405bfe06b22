//! A rendering for programs: one JSON document.

use k8s_openapi::ByteString;
use serde::Serialize;

use super::model::{EntryKind, RenderedContent, RenderedVolume, Rendering, visible};

#[derive(Serialize)]
struct JsonRendering<'a> {
    pod: JsonPod<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<&'a str>,
    volumes: Vec<JsonVolume<'a>>,
}

#[derive(Serialize)]
struct JsonPod<'a> {
    namespace: &'a str,
    name: &'a str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct JsonVolume<'a> {
    name: &'a str,
    kind: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    mount_path: Option<String>,
    #[serde(flatten)]
    content: VolumeContent<'a>,
}

/// The fields of a volume besides its `state`.
#[derive(Serialize)]
#[serde(tag = "state", rename_all = "camelCase")]
enum VolumeContent<'a> {
    Ready { entries: Vec<JsonEntry<'a>> },
    OfNode { description: &'a str },
    Waiting { reason: &'a str },
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct JsonEntry<'a> {
    /// `.` is the volume itself.
    path: &'a str,
    r#type: &'static str,
    mode: String,
    uid: u32,
    gid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    secret: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_base64: Option<ByteString>,
}

/// The rendering as a document.
///
/// # Errors
/// Only when memory runs out: everything in it can be written as JSON.
pub fn text(rendering: &Rendering<'_>, reveal: bool) -> Result<String, serde_json::Error> {
    let document = JsonRendering {
        pod: JsonPod { namespace: &rendering.namespace, name: &rendering.name },
        container: rendering.container.as_deref(),
        volumes: rendering.places.iter().map(|place| volume(place, rendering.container.is_some(), reveal)).collect(),
    };
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

fn volume<'a>(place: &'a RenderedVolume<'_>, of_container: bool, reveal: bool) -> JsonVolume<'a> {
    let content = match &place.content {
        RenderedContent::Entries(entries) => {
            VolumeContent::Ready { entries: entries.iter().map(|one| entry(one, reveal)).collect() }
        }
        RenderedContent::OfNode(description) => VolumeContent::OfNode { description },
        RenderedContent::Waiting(reason) => VolumeContent::Waiting { reason },
    };
    let mount_path = of_container.then(|| format!("/{}", place.path));
    JsonVolume { name: &place.volume, kind: &place.kind, mount_path, content }
}

fn entry<'a>(entry: &'a super::model::RenderedEntry<'_>, reveal: bool) -> JsonEntry<'a> {
    let (r#type, target, file) = match &entry.kind {
        EntryKind::Directory => ("directory", None, None),
        EntryKind::Link(target) => ("link", Some(target.as_str()), None),
        EntryKind::File { content, is_secret } => ("file", None, Some((&**content, *is_secret))),
    };
    let shown = file.and_then(|(content, is_secret)| visible(content, is_secret, reveal));
    let as_text = shown.map(str::from_utf8);
    JsonEntry {
        path: if entry.path.is_empty() { "." } else { &entry.path },
        r#type,
        mode: format!("{:04o}", entry.mode),
        uid: entry.uid,
        gid: entry.gid,
        target,
        size: entry.kind.size(),
        secret: file.map(|(_, is_secret)| is_secret),
        content: as_text.and_then(Result::ok),
        content_base64: shown.filter(|_| matches!(as_text, Some(Err(_)))).map(|bytes| ByteString(bytes.to_vec())),
    }
}
