//! The files of a ConfigMap or a Secret.

use super::Problem;
use crate::manifest::objects::{ObjectKind, Values};
use crate::types::PayloadPath;
use crate::volume::ObjectSource;

/// A key of an object, and the file that it becomes.
pub(super) struct ObjectFile<'a> {
    pub(super) key: &'a str,
    pub(super) path: PayloadPath,
    pub(super) content: &'a [u8],
    pub(super) mode: Option<u16>,
    pub(super) user: Option<u32>,
}

/// The files of one source: the listed keys, or all keys. `values` are those of the object, if the object exists.
///
/// # Errors
/// Everything that is missing and not optional.
pub(super) fn files<'a>(
    kind: ObjectKind,
    object: &'a ObjectSource,
    values: Option<&'a impl Values>,
) -> Result<Vec<ObjectFile<'a>>, Vec<Problem>> {
    let Some(values) = values else {
        return if object.optional { Ok(Vec::new()) } else { Err(vec![not_found(kind, object)]) };
    };
    if object.items.is_empty() {
        return all_keys(values);
    }
    let mut files = Vec::new();
    let mut problems = Vec::new();
    for item in &object.items {
        match values.value(&item.key) {
            Some(content) => files.push(ObjectFile {
                key: &item.key,
                path: item.path.clone(),
                content,
                mode: item.mode,
                user: item.user,
            }),
            None if object.optional => {}
            None => problems.push(key_not_found(kind, &item.key)),
        }
    }
    if problems.is_empty() { Ok(files) } else { Err(problems) }
}

fn all_keys(values: &impl Values) -> Result<Vec<ObjectFile<'_>>, Vec<Problem>> {
    let file = |(key, content)| {
        let path = PayloadPath::parse(key).map_err(|error| vec![Problem::Path(error)])?;
        Ok(ObjectFile { key, path, content, mode: None, user: None })
    };
    values.values().map(file).collect()
}

fn not_found(kind: ObjectKind, object: &ObjectSource) -> Problem {
    match kind {
        ObjectKind::Secret => Problem::SecretNotFound(object.name.clone()),
        _ => Problem::ConfigMapNotFound(object.name.clone()),
    }
}

fn key_not_found(kind: ObjectKind, key: &str) -> Problem {
    match kind {
        ObjectKind::Secret => Problem::SecretKeyNotFound(key.to_owned()),
        _ => Problem::ConfigMapKeyNotFound(key.to_owned()),
    }
}
