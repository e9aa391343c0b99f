//! [`put_back`]: a dead letter, published again.

use async_nats::HeaderMap;
use async_nats::jetstream::Context;
use inbox_core::{DeadLetter, DeadLetters, Error, ErrorKind, Inbox, MessageId, Result};

use crate::error::{broker, not_published};
use crate::ids::{ID, PUT_BACK_GROUP, PUT_BACK_ID, PUT_BACK_PLACE, Place};

/// Puts a dead letter back: the inbox forgets that the message was processed, the message is published to its subject again
/// with its headers and its id, and the letter is removed. `false` if there is no such letter.
///
/// Safe to repeat, after an error and after a crash: see [`Inbox::put_back`]. Of the headers that NATS itself reads
/// (`Nats-...`) only the id is published again: the others (expectations, roll-ups, schedules) were about the first
/// publishing. Other consumer groups of the stream get the message too, under the id that they know it by, and find a
/// duplicate.
///
/// One message published, its confirmation awaited; and the store's own three steps.
///
/// # Errors
///
/// Those of [`Inbox::put_back`]. [`ErrorKind::Busy`], which is retryable, as long as the stream's duplicate window
/// lasts: the server takes what is published for the message that it has, and drops it. [`ErrorKind::Broker`] where no stream takes
/// the subject, or the server refuses. The letter is kept in each case.
pub async fn put_back<S: DeadLetters>(context: &Context, inbox: &Inbox<S>, id: MessageId) -> Result<bool> {
    inbox
        .put_back(id, async |letter: &DeadLetter| publish(context, letter).await)
        .await
}

async fn publish(context: &Context, letter: &DeadLetter) -> Result<()> {
    let info = &letter.info;
    let sent = context
        .publish_with_headers(info.subject.clone(), headers(letter)?, letter.payload.clone().into())
        .await
        .map_err(|error| not_published(error, &info.subject))?;
    let kept = sent.await.map_err(|error| not_published(error, &info.subject))?;
    // A duplicate of an earlier putting back is what was wanted; one of the message that was given up is not.
    let given_up = Place::parse(&info.origin);
    if kept.duplicate && given_up.is_some_and(|place| place.stream == kept.stream && place.sequence == kept.sequence) {
        return Err(Error::new(
            ErrorKind::Busy,
            format!(
                "the duplicate window of stream {} is not over yet, so the server took message {} for the one that it has \
                 already; the dead letter is kept: put it back again when the window (two minutes by default) is over",
                kept.stream,
                info.key.id()
            ),
        ));
    }
    tracing::info!(
        group = %info.key.group(),
        message = %info.key.id(),
        subject = info.subject,
        stream = kept.stream,
        sequence = kept.sequence,
        "put back"
    );
    Ok(())
}

fn headers(letter: &DeadLetter) -> Result<HeaderMap> {
    let key = &letter.info.key;
    let mut headers = HeaderMap::new();
    let mut place = None;
    for (name, value) in letter.headers.iter() {
        let lower = name.to_ascii_lowercase();
        let is = |other: &str| lower == other.to_ascii_lowercase();
        if is(PUT_BACK_PLACE) {
            place = std::str::from_utf8(value).ok().map(str::to_owned);
        }
        if is(PUT_BACK_PLACE) || is(PUT_BACK_ID) || is(PUT_BACK_GROUP) || (lower.starts_with("nats-") && !is(ID)) {
            continue;
        }
        append(&mut headers, name, value)?;
    }
    // Where it stood first, however often it is put back.
    let place = place.filter(|place| Place::parse(place).is_some());
    let origin = place.or_else(|| Place::parse(&letter.info.origin).map(|place| place.to_string()));
    if let Some(origin) = origin {
        append(&mut headers, PUT_BACK_PLACE, origin.as_bytes())?;
    }
    append(&mut headers, PUT_BACK_ID, key.id().to_string().as_bytes())?;
    append(&mut headers, PUT_BACK_GROUP, key.group().as_str().as_bytes())?;
    Ok(headers)
}

fn append(headers: &mut HeaderMap, name: &str, value: &[u8]) -> Result<()> {
    let unfit = |what: &str| {
        broker(format!(
            "the header {name:?} of the dead letter has a {what} that NATS cannot carry: it came from another broker, or \
             somebody changed it"
        ))
    };
    let value = std::str::from_utf8(value)
        .ok()
        .and_then(|value| value.parse::<async_nats::HeaderValue>().ok())
        .ok_or_else(|| unfit("value"))?;
    let name = name.parse::<async_nats::HeaderName>().map_err(|_| unfit("name"))?;
    headers.append(name, value);
    Ok(())
}
