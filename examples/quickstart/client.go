package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
)

// A request is one streamed chat completion and what its client saw of it.
type request struct {
	name     string
	key      string // API key
	prompt   int    // tokens
	max      int    // tokens to generate
	received atomic.Int64

	// Written by the client's goroutine; to be read once it has reported first or end.
	sent, first time.Time // first token; zero without one

	// Likewise, once it has reported end.
	end    time.Time
	status int
	bytes  int64
	event  apiError  // of an error event; zero without one
	told   time.Time // when that event came
	finish string    // finish_reason
	done   bool      // [DONE] came
	err    error     // how the stream was cut; nil if it ended cleanly
}

// complete reports whether the client has all that it asked for.
func (r *request) complete() bool {
	return r.err == nil && r.status == http.StatusOK && r.done && r.finish == "length" && int(r.received.Load()) == r.max && r.event == (apiError{})
}

// An apiError is an error as the OpenAI API puts it.
type apiError struct{ Code, Message string }

// A report is what a client tells while it waits for its response.
type report struct {
	*request
	end bool // else it has the first token
}

// do sends the request and reads the response to its end. It reports twice at most.
func (r *request) do(ctx context.Context, c *http.Client, url string, reports chan<- report) {
	r.err = r.stream(ctx, c, url, func() { reports <- report{r, false} })
	r.end = time.Now()
	reports <- report{r, true}
}

func (r *request) stream(ctx context.Context, c *http.Client, url string, first func()) error {
	r.sent = time.Now()
	body, err := json.Marshal(map[string]any{
		"messages":   []map[string]string{{"role": "user", "content": strings.Repeat("why ", r.prompt)}},
		"max_tokens": r.max,
		"stream":     true,
	})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+r.key)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", r.name)
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	r.status = resp.StatusCode
	lines := bufio.NewScanner(&counter{resp.Body, &r.bytes})
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		if !ok {
			continue
		}
		if string(data) == "[DONE]" {
			r.done = true
			continue
		}
		var chunk struct {
			Choices []struct {
				Delta        struct{ Content string }
				FinishReason string `json:"finish_reason"`
			}
			Error *apiError
		}
		if err := json.Unmarshal(data, &chunk); err != nil {
			return fmt.Errorf("event %q: %w", data, err)
		}
		if chunk.Error != nil {
			r.event, r.told = *chunk.Error, time.Now()
		}
		for _, c := range chunk.Choices {
			r.finish = c.FinishReason
			if c.Delta.Content != "" && r.received.Add(1) == 1 {
				r.first = time.Now()
				first()
			}
		}
	}
	return lines.Err()
}

// A counter counts the bytes read.
type counter struct {
	io.Reader
	n *int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	*c.n += int64(n)
	return n, err
}
