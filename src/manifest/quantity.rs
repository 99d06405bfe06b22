//! Quantities written as numbers. `cpu: 1` is a number in YAML and JSON, and the API takes it as the quantity `"1"`;
//! the typed objects know quantities as strings only.

use serde_json::{Map, Value};

/// Fields that hold quantities by resource.
const BY_RESOURCE: [&str; 5] = ["limits", "requests", "overhead", "allocatable", "capacity"];
/// Fields that hold one quantity.
const SINGLE: [&str; 2] = ["divisor", "sizeLimit"];

/// Whether documents of this kind hold quantities. In others, such as ConfigMaps, the same names are keys of data.
pub(super) fn has_quantities(kind: &str) -> bool {
    matches!(kind, "Pod" | "Node")
}

/// Turns the numbers among the quantities of `body` into strings.
pub(super) fn quote_numbers(body: &mut Map<String, Value>) {
    for (field, value) in body {
        match value {
            Value::Number(number) if SINGLE.contains(&field.as_str()) => *value = Value::String(number.to_string()),
            Value::Object(resources) if BY_RESOURCE.contains(&field.as_str()) => {
                resources.values_mut().for_each(quote_number);
            }
            _ => descend(value),
        }
    }
}

fn descend(value: &mut Value) {
    match value {
        Value::Object(body) => quote_numbers(body),
        Value::Array(items) => items.iter_mut().for_each(descend),
        _ => {}
    }
}

fn quote_number(value: &mut Value) {
    if let Value::Number(number) = value {
        *value = Value::String(number.to_string());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_quoted_where_quantities_stand_and_nowhere_else() {
        let resources = json!({"limits": {"cpu": 1, "memory": "64Mi"}, "requests": {"cpu": 0.5}});
        let pod = json!({"spec": {"containers": [{"ports": [{"containerPort": 80}], "resources": resources}]}});
        let Value::Object(mut pod) = pod else { unreachable!("an object") };
        quote_numbers(&mut pod);
        let container = &pod["spec"]["containers"][0];
        assert_eq!(container["resources"]["limits"], json!({"cpu": "1", "memory": "64Mi"}));
        assert_eq!(container["resources"]["requests"], json!({"cpu": "0.5"}));
        assert_eq!(container["ports"][0]["containerPort"], json!(80));
    }
}
