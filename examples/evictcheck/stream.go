package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A stream is one request of the check and what its client sees.
type stream struct {
	id   string
	stop context.CancelFunc // hangs up
	over chan struct{}      // closed when it has ended

	mu sync.Mutex
	s  seen
}

// seen is what a client has seen so far.
type seen struct {
	status  int
	ids     []string  // names that the response gives the request
	tokens  int       // events with a part of the answer
	first   time.Time // the first of them; zero before
	code    string    // of an error, in an event or in the body
	told    time.Time // when an event said so
	finish  string    // finish_reason
	done    bool      // [DONE], or the whole of an answer that is not streamed
	excerpt string    // of a body that is no stream
	end     time.Time // zero while it runs
	err     error     // how it was cut
}

func (s *stream) look() seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.s
}

func (s *stream) note(f func(*seen)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.s)
}

// runs reports whether s has a part of its answer and not yet its end.
func (s *stream) runs() bool {
	v := s.look()
	return !v.first.IsZero() && v.end.IsZero()
}

// How a stream ended.
const (
	endRunning    = "running"           // it has not
	endStatus     = "status"            // an error status and no stream
	endEventReset = "error_event_reset" // an error event, then a reset
	endEventClean = "error_event_end"   // an error event, then a clean end
	endReset      = "reset"             // a reset without a word
	endClean      = "clean_end"         // a clean end without the rest of the answer
	endComplete   = "complete"          // the whole answer
)

func (v seen) how() string {
	switch {
	case v.end.IsZero():
		return endRunning
	case v.status != 0 && v.status != http.StatusOK:
		return endStatus
	case v.code != "" && v.err != nil:
		return endEventReset
	case v.code != "":
		return endEventClean
	case v.err != nil:
		return endReset
	case v.done && v.finish != "abort":
		return endComplete
	default:
		return endClean
	}
}

// text says how for people, with times from start on if there is one.
func (v seen) text(start time.Time) string {
	after := func(t time.Time) string {
		if start.IsZero() {
			return ""
		}
		return " after " + ms(since(start, t))
	}
	event := fmt.Sprintf("error event %q%s", v.code, after(v.told))
	text := ""
	switch v.how() {
	case endRunning:
		if v.code != "" {
			return event + ", and no end"
		}
		return "runs on"
	case endStatus:
		text = fmt.Sprintf("status %d", v.status)
		switch {
		case v.code != "":
			text += fmt.Sprintf(", error %q,", v.code)
		case v.excerpt == "":
			text += " without a body"
		default:
			text += " " + strconv.Quote(v.excerpt)
		}
	case endEventReset:
		text = event + ", reset"
	case endEventClean:
		text = event + ", clean end"
	case endReset:
		text = "reset"
	case endComplete:
		text = "complete"
	default:
		text = "a clean end, as if the answer were complete,"
	}
	return text + after(v.end)
}

// start sends a request to a base URL and reads its response, on a goroutine that ends
// with it. Whoever starts it stops it.
func (c *check) start(ctx context.Context, base string, streamed bool, tokens int) *stream {
	ctx, cancel := context.WithCancel(ctx)
	s := &stream{id: "evictcheck-" + strings.ToLower(rand.Text()), stop: cancel, over: make(chan struct{})}
	go func() {
		defer close(s.over)
		defer cancel()
		err := c.request(ctx, s, base, streamed, tokens)
		s.note(func(v *seen) { v.err, v.end = err, time.Now() })
	}()
	return s
}

func (c *check) request(ctx context.Context, s *stream, base string, streamed bool, tokens int) error {
	body := map[string]any{
		"max_tokens": tokens, "stream": streamed,
		"ignore_eos": true, // vLLM's and others': it ends at max_tokens and not before
	}
	if c.model != "" {
		body["model"] = c.model
	}
	if prompt := newPrompt(c.prompt); strings.HasSuffix(c.path, "/chat/completions") {
		body["messages"] = []map[string]string{{"role": "user", "content": prompt}}
	} else {
		body["prompt"] = prompt
	}
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+c.path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	req.Header = c.header.Clone()
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", s.id)
	if host := req.Header.Get("Host"); host != "" {
		req.Host = host
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	s.note(func(v *seen) {
		v.status = resp.StatusCode
		v.ids = append(v.ids, resp.Header.Values("X-Request-Id")...)
	})
	if resp.StatusCode != http.StatusOK || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		return s.readBody(resp.Body)
	}
	return s.readEvents(resp.Body)
}

// newPrompt returns n bytes of random text, so that no two requests share a prefix in
// the KV cache.
func newPrompt(n int) string {
	var b strings.Builder
	for b.Len() < n {
		b.WriteString(strings.ToLower(rand.Text()[:5]))
		b.WriteByte(' ')
	}
	return b.String()[:n]
}

const maxAnswer = 8 << 20 // bytes of a body, and of an event

// readBody reads an answer that is not streamed.
func (s *stream) readBody(r io.Reader) error {
	body, err := io.ReadAll(io.LimitReader(r, maxAnswer))
	s.note(func(v *seen) {
		v.excerpt = fmt.Sprintf("%.200s", body)
		v.done = err == nil
		v.take(body, time.Time{})
	})
	return err
}

// readEvents reads server-sent events.
func (s *stream) readEvents(r io.Reader) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxAnswer)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data:"))
		if !ok {
			continue
		}
		data = bytes.TrimSpace(data)
		s.note(func(v *seen) {
			if string(data) == "[DONE]" {
				v.done = true
				return
			}
			v.take(data, time.Now())
		})
	}
	return lines.Err()
}

// take notes what an event, or a whole body without a time, says. What is no JSON says
// nothing.
func (v *seen) take(data []byte, at time.Time) {
	var chunk struct {
		ID      string
		Choices []struct {
			FinishReason string `json:"finish_reason"`
		}
		Error *struct{ Code, Type, Message any }
	}
	if json.Unmarshal(data, &chunk) != nil {
		return
	}
	if chunk.ID != "" && v.tokens == 0 {
		v.ids = append(v.ids, chunk.ID)
	}
	if e := chunk.Error; e != nil {
		v.code, v.told = "error", at
		for _, f := range []any{e.Message, e.Type, e.Code} { // the last that there is
			if text, ok := f.(string); ok && text != "" {
				v.code = text
			}
		}
		return
	}
	for _, c := range chunk.Choices {
		v.finish = c.FinishReason
	}
	if len(chunk.Choices) > 0 && !at.IsZero() {
		v.tokens++
		if v.first.IsZero() {
			v.first = at
		}
	}
}
