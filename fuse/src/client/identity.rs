//! The name of a volume, and what else the supervisor says of it when it mounts it.
//!
//! The messages to the server have the name in three places, and other versions of podfs read them there: in the options of
//! passthrough volumes and exports, in the subject of the access log, and in what the supervisor that adopts the volume gets. All
//! of them come from one [`VolumeIdentity`].

use serde_json::Value;

use crate::label::VolumeLabel;
use crate::protocol::Reporting;

/// The field for the name, in the subject of the access log and in what is said of a volume.
const NAME: &str = "volume";

/// The name of a volume, and what the supervisor that adopts it has to know.
#[derive(Clone, Debug, Default)]
pub struct VolumeIdentity {
    name: String,
    about: Value,
}

impl VolumeIdentity {
    /// A volume of this name. `about` is an object for the supervisor that adopts the volume if this one is killed; it gets the
    /// name, too.
    pub fn new(name: &str, about: Value) -> Self {
        Self { name: name.to_owned(), about }
    }

    /// For log lines of this process.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// For log lines of the server.
    pub(super) fn label(&self) -> VolumeLabel {
        VolumeLabel::new(&self.name)
    }

    /// For the access log.
    pub(super) fn reporting(&self, reporting: &Reporting) -> Reporting {
        let mut reporting = reporting.clone();
        if let Some(subject) = &mut reporting.audit {
            subject.0.insert(NAME.to_owned(), self.name.as_str().into());
        }
        reporting
    }

    /// For the supervisor that adopts the volume.
    pub(super) fn about(&self) -> Value {
        let mut about = self.about.clone();
        if let Value::Object(fields) = &mut about {
            fields.insert(NAME.to_owned(), self.name.as_str().into());
        }
        about
    }
}

/// The name in what a supervisor has said of a volume.
pub(super) fn name_in(about: &Value) -> Option<&str> {
    about[NAME].as_str()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::audit::Subject;

    #[test]
    fn the_name_is_where_other_versions_look_for_it() {
        let identity = VolumeIdentity::new("db", json!({"path": "/p"}));
        assert_eq!(identity.about(), json!({"path": "/p", "volume": "db"}));
        assert_eq!(name_in(&identity.about()), Some("db"));
        assert_eq!(serde_json::to_value(identity.label()).expect("text"), json!("db"));
        let Value::Object(subject) = json!({"pod": {}}) else { unreachable!("it is one") };
        let reporting = Reporting { trace: false, audit: Some(Subject(subject)) };
        let reported = serde_json::to_value(identity.reporting(&reporting)).expect("an object");
        assert_eq!(reported["audit"], json!({"pod": {}, "volume": "db"}));
    }
}
