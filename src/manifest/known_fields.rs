//! The fields that a type of the API knows, and the unknown ones that resemble them.
//!
//! A type says the names of its fields when it is deserialized.

use std::cell::{Cell, RefCell};

use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error, IntoDeserializer, MapAccess, SeqAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use serde_json::{Map, Value, map};

use crate::types::InvalidField;

/// The least similarity (normalised Damerau-Levenshtein, 0 to 1) of a misspelled field with the field that is meant.
const ALIKE: f64 = 0.75;
/// The most letters that are wrong in a misspelled field.
const WRONG_LETTERS: usize = 2;

/// Checks the names in a mapping, except those for which no field is meant that counts.
///
/// # Errors
/// An unknown field that resembles a known one.
pub(super) fn names(
    body: &Map<String, Value>,
    known: &[&str],
    counts: impl Fn(&str) -> bool,
) -> Result<(), InvalidField> {
    let given = body.iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name.as_str());
    let misspelled = given.filter(|name| !known.contains(name));
    let mut meant = misspelled.filter_map(|name| Some((name, nearest(name, known)?)));
    match meant.find(|(_, meant)| counts(meant)) {
        Some((name, meant)) => Err(InvalidField::new(name, format!("unknown field; did you mean {meant:?}?"))),
        None => Ok(()),
    }
}

/// The known field that a misspelled one resembles.
fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let name = name.to_lowercase();
    let wrong_letters = |known: &str| strsim::damerau_levenshtein(&known.to_lowercase(), &name);
    let nearest = known.iter().min_by_key(|known| wrong_letters(known))?;
    let similarity = strsim::normalized_damerau_levenshtein(&nearest.to_lowercase(), &name);
    (wrong_letters(nearest) <= WRONG_LETTERS && similarity >= ALIKE).then_some(*nearest)
}

/// Checks the names of all fields of a value of this type.
///
/// # Errors
/// An unknown field that resembles a known one.
pub(super) fn below<T: DeserializeOwned>(value: Option<&Value>, field: &str) -> Result<(), InvalidField> {
    let Some(value) = value else { return Ok(()) };
    let found = RefCell::new(None);
    // A value of a wrong type ends the search; the parser reports it.
    let _ = T::deserialize(CheckedValue { value, field: field.to_owned(), found: &found });
    found.into_inner().map_or(Ok(()), Err)
}

/// The names of the fields of a type.
pub(super) fn fields_of<T: DeserializeOwned>() -> &'static [&'static str] {
    let names: Cell<&'static [&'static str]> = Cell::new(&[]);
    // It ends with an error as soon as the type has said the names.
    let _ = T::deserialize(FieldNames(&names));
    names.get()
}

/// Hears which fields a type has, and has no value for it.
struct FieldNames<'a>(&'a Cell<&'static [&'static str]>);

impl<'de> Deserializer<'de> for FieldNames<'_> {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(Self::Error::custom("there is no value"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        self.0.set(fields);
        self.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// A value of a manifest, which hears which fields its type has.
struct CheckedValue<'a> {
    value: &'a Value,
    /// The path of the value.
    field: String,
    /// The first misspelled field.
    found: &'a RefCell<Option<InvalidField>>,
}

impl<'de> Deserializer<'de> for CheckedValue<'de> {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        match self.value {
            Value::Object(body) => visitor.visit_map(CheckedFields { entries: body.iter(), value: None, whole: self }),
            Value::Array(items) => visitor.visit_seq(CheckedItems { items: items.iter().enumerate(), whole: self }),
            scalar => scalar.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        if self.value.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        if let Some(Err(error)) = self.value.as_object().map(|body| names(body, fields, |_| true)) {
            let error = if self.field.is_empty() { error } else { error.under(&self.field) };
            self.found.borrow_mut().get_or_insert(error);
        }
        self.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// The fields of a mapping.
struct CheckedFields<'a> {
    entries: map::Iter<'a>,
    /// The name and the value of the last field that was visited.
    value: Option<(&'a str, &'a Value)>,
    whole: CheckedValue<'a>,
}

impl<'de> MapAccess<'de> for CheckedFields<'de> {
    type Error = serde_json::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Self::Error> {
        let Some((name, value)) = self.entries.next() else { return Ok(None) };
        self.value = Some((name, value));
        let name: StrDeserializer<'_, Self::Error> = name.as_str().into_deserializer();
        seed.deserialize(name).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Self::Error> {
        let (name, value) = self.value.take().ok_or_else(|| Self::Error::custom("there is no field"))?;
        let field = match self.whole.field.as_str() {
            "" => name.to_owned(),
            parent => format!("{parent}.{name}"),
        };
        seed.deserialize(CheckedValue { value, field, found: self.whole.found })
    }
}

/// The items of a list.
struct CheckedItems<'a, I> {
    items: I,
    whole: CheckedValue<'a>,
}

impl<'de, I: Iterator<Item = (usize, &'de Value)>> SeqAccess<'de> for CheckedItems<'de, I> {
    type Error = serde_json::Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Self::Error> {
        let Some((index, value)) = self.items.next() else { return Ok(None) };
        let field = format!("{}[{index}]", self.whole.field);
        seed.deserialize(CheckedValue { value, field, found: self.whole.found }).map(Some)
    }
}
