//! Tokens of the pod's service account, as a source has them at one moment.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::volume::TokenKey;

/// The tokens that volumes ask for, or why there is none. A source that cannot issue tokens has neither. Cheap to
/// clone.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Tokens {
    by_key: Arc<BTreeMap<TokenKey, Token>>,
}

type Token = Result<Vec<u8>, String>;

impl Tokens {
    /// The token that was issued for this, or the reason why there is none; nothing if it was never asked for.
    pub fn get(&self, key: &TokenKey) -> Option<Result<&[u8], &str>> {
        self.by_key.get(key).map(|token| token.as_deref().map_err(String::as_str))
    }
}

impl FromIterator<(TokenKey, Token)> for Tokens {
    fn from_iter<T: IntoIterator<Item = (TokenKey, Token)>>(tokens: T) -> Self {
        Tokens { by_key: Arc::new(tokens.into_iter().collect()) }
    }
}

/// Shows what was asked for, and sizes; the bytes are secret.
impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |token: &Token| token.as_ref().map(|bytes| format!("{} bytes", bytes.len())).map_err(String::clone);
        f.debug_map().entries(self.by_key.iter().map(|(key, token)| (key, shown(token)))).finish()
    }
}
