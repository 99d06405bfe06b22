//! Null values as Go decodes them (encoding/json, `Unmarshal`): into a pointer, a map or a list, null is nothing; into any other
//! value, null has no effect, so the value stays the empty one of its type. API servers send such values, and so do manifests:
//! `data: {key: null}` is a key with an empty text.

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::{Error, Value};

/// A value whose nulls, at any depth, are what Go makes of them.
pub(super) struct WithNulls(pub(super) Value);

impl IntoDeserializer<'_, Error> for WithNulls {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// Methods for types whose empty value is passed to the visitor in place of null.
macro_rules! empty_for_null {
    ($($method:ident => $visit:ident($empty:expr),)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            match self.0 {
                Value::Null => visitor.$visit($empty),
                _ => self.deserialize_any(visitor),
            }
        }
    )*};
}

impl<'de> Deserializer<'de> for WithNulls {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(items) => {
                let mut items = SeqDeserializer::new(items.into_iter().map(WithNulls));
                let visited = visitor.visit_seq(&mut items)?;
                items.end()?;
                Ok(visited)
            }
            Value::Object(fields) => {
                let mut fields = MapDeserializer::new(fields.into_iter().map(|(name, value)| (name, WithNulls(value))));
                let visited = visitor.visit_map(&mut fields)?;
                fields.end()?;
                Ok(visited)
            }
            scalar => scalar.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, Error> {
        match (self.0, name) {
            // These types take a number or a text, so they do not say what they want; Go makes zero of null.
            (Value::Null, "Quantity" | "IntOrString") => visitor.visit_newtype_struct(0_i64.into_deserializer()),
            (value, _) => visitor.visit_newtype_struct(WithNulls(value)),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_map(visitor)
    }

    empty_for_null! {
        deserialize_bool => visit_bool(false),
        deserialize_i8 => visit_i64(0),
        deserialize_i16 => visit_i64(0),
        deserialize_i32 => visit_i64(0),
        deserialize_i64 => visit_i64(0),
        deserialize_u8 => visit_u64(0),
        deserialize_u16 => visit_u64(0),
        deserialize_u32 => visit_u64(0),
        deserialize_u64 => visit_u64(0),
        deserialize_f32 => visit_f64(0.0),
        deserialize_f64 => visit_f64(0.0),
        deserialize_str => visit_str(""),
        deserialize_string => visit_str(""),
        deserialize_bytes => visit_bytes(b""),
        deserialize_byte_buf => visit_bytes(b""),
        deserialize_seq => visit_seq(SeqDeserializer::<_, Error>::new(std::iter::empty::<WithNulls>())),
        deserialize_map => visit_map(MapDeserializer::<_, Error>::new(std::iter::empty::<(String, WithNulls)>())),
    }

    forward_to_deserialize_any! { char unit unit_struct tuple tuple_struct identifier ignored_any i128 u128 }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use k8s_openapi::api::core::v1::{ConfigMap, Container, Pod, PodSpec, Secret};
    use serde::Deserialize;
    use serde::de::DeserializeOwned;
    use serde_json::json;

    use super::*;

    fn typed<T: DeserializeOwned>(value: Value) -> T {
        T::deserialize(WithNulls(value)).expect("Go accepts it")
    }

    #[test]
    fn nulls_are_what_go_makes_of_them() {
        let map: ConfigMap = typed(json!({"data": {"a": null, "b": "x"}, "metadata": {"annotations": {"c": null}}}));
        let texts = |of: &[(&str, &str)]| of.iter().map(|(key, text)| ((*key).into(), (*text).into())).collect();
        let expected: BTreeMap<String, String> = texts(&[("a", ""), ("b", "x")]);
        assert_eq!(map.data, Some(expected));
        assert_eq!(map.metadata.annotations, Some(texts(&[("c", "")])));
        let secret: Secret = typed(json!({"data": {"a": null}, "stringData": null, "type": null, "metadata": null}));
        assert_eq!(secret.data.expect("data")["a"].0, b"");
        assert!(secret.string_data.is_none() && secret.type_.is_none() && secret.metadata.name.is_none());
        let pod: Pod = typed(json!({"metadata": {"name": null}, "spec": {
            "containers": [{"name": null, "args": [null, "x"], "env": null, "resources": {"requests": {"cpu": null}},
                "readinessProbe": {"tcpSocket": {"port": null}}}, null],
            "volumes": [{"name": "v", "emptyDir": {"sizeLimit": null, "medium": null}}, {"name": "w", "emptyDir": null}],
            "hostNetwork": null, "terminationGracePeriodSeconds": null}}));
        assert_eq!(pod.metadata.name, None);
        let PodSpec { containers, volumes, host_network, .. } = pod.spec.expect("a spec");
        let requests = containers[0].resources.as_ref().and_then(|resources| resources.requests.as_ref());
        assert_eq!(requests.expect("requests")["cpu"].0, "0");
        assert_eq!(containers[0].args, Some(vec![String::new(), "x".to_owned()]));
        assert_eq!((containers[0].name.as_str(), &containers[1]), ("", &Container::default()));
        assert_eq!(host_network, None);
        let volumes = volumes.expect("volumes");
        assert_eq!(volumes[0].empty_dir.as_ref().expect("one").size_limit, None);
        assert!(volumes[1].empty_dir.is_none(), "a volume without a source");
        let spec: PodSpec = typed(json!({"containers": null}));
        assert!(spec.containers.is_empty());
    }

    #[test]
    fn values_of_another_type_are_refused_as_before() {
        for (value, sentence) in [
            (json!({"data": {"a": 1}}), "invalid type: integer `1`, expected a string"),
            (json!({"data": []}), "invalid type: sequence, expected a map"),
            (json!({"immutable": "yes"}), "invalid type: string \"yes\", expected a boolean"),
        ] {
            let error = ConfigMap::deserialize(WithNulls(value)).expect_err("a wrong type");
            assert_eq!(error.to_string(), sentence);
        }
    }
}
