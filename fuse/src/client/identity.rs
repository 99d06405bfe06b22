//! The name of a volume, and the supervisor's record about it.
//!
//! The messages to the server have the name in three places, and other versions of podfs read it there: in the options of
//! passthrough volumes and exports, in the subject of the access log, and in the record for the supervisor that adopts the volume.
//! All of them come from one [`VolumeIdentity`].

use serde_json::Value;

use crate::label::{NAME, VolumeLabel};
use crate::protocol::Reporting;

/// The name of a volume, and the record for the supervisor that adopts it.
#[derive(Clone, Debug, Default)]
pub struct VolumeIdentity {
    name: String,
    about: Value,
}

impl VolumeIdentity {
    /// The identity of a volume. `about` is a JSON object for the supervisor that adopts the volume if this one is killed.
    /// [`VolumeIdentity`] adds the name to it.
    pub fn new(name: &str, about: Value) -> Self {
        Self { name: name.to_owned(), about }
    }

    /// The name, for log lines of this process.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The label for log lines of the server.
    pub(super) fn label(&self) -> VolumeLabel {
        VolumeLabel::new(&self.name)
    }

    /// The reporting with the name in the subject of the access log.
    pub(super) fn reporting(&self, reporting: &Reporting) -> Reporting {
        let mut reporting = reporting.clone();
        if let Some(subject) = &mut reporting.audit {
            subject.0.insert(NAME.to_owned(), self.name.as_str().into());
        }
        reporting
    }

    /// The record with the name, for the supervisor that adopts the volume.
    pub(super) fn about(&self) -> Value {
        let mut about = self.about.clone();
        if let Value::Object(fields) = &mut about {
            fields.insert(NAME.to_owned(), self.name.as_str().into());
        }
        about
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::audit::AuditSubject;
    use crate::label::name_in;

    #[test]
    fn the_name_is_where_other_versions_look_for_it() {
        let identity = VolumeIdentity::new("db", json!({"path": "/p"}));
        assert_eq!(identity.about(), json!({"path": "/p", "volume": "db"}));
        assert_eq!(name_in(&identity.about()), Some("db"));
        assert_eq!(serde_json::to_value(identity.label()).expect("text"), json!("db"));
        let Value::Object(subject) = json!({"pod": {}}) else { unreachable!("it is one") };
        let reporting = Reporting { trace: false, audit: Some(AuditSubject(subject)) };
        let reported = serde_json::to_value(identity.reporting(&reporting)).expect("an object");
        assert_eq!(reported["audit"], json!({"pod": {}, "volume": "db"}));
    }
}
