package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

const maxBody = 8 << 20 // bytes of a request

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	method, serve := http.MethodGet, http.HandlerFunc(nil)
	switch r.URL.Path {
	case "/v1/chat/completions", "/v1/completions":
		method, serve = http.MethodPost, s.complete
	case "/v1/models":
		serve = s.serveModels
	case "/health":
		serve = s.serveHealth
	case "/metrics":
		serve = s.serveMetrics
	}
	switch {
	case serve == nil:
		write(w, http.StatusNotFound, apiError{Message: "no such path"})
	case r.Method == method, r.Method == http.MethodHead && method == http.MethodGet:
		serve(w, r)
	default:
		w.Header().Set("Allow", method)
		write(w, http.StatusMethodNotAllowed, apiError{Message: "use " + method})
	}
}

func (s *Server) serveModels(w http.ResponseWriter, _ *http.Request) {
	write(w, http.StatusOK, map[string]any{"object": "list", "data": []map[string]any{{
		"id": s.cfg.Model, "object": "model", "created": s.start.Unix(), "owned_by": "engine", "max_model_len": s.core.Capacity(),
	}}})
}

func (s *Server) serveHealth(w http.ResponseWriter, _ *http.Request) {
	select {
	case <-s.done:
		w.WriteHeader(http.StatusServiceUnavailable)
	default:
		w.WriteHeader(http.StatusOK)
	}
}

// params is the part of a request's body that matters here; as in vLLM everything else is ignored.
type params struct {
	Model    string `json:"model"`
	Messages []struct {
		Content text `json:"content"`
	} `json:"messages"`
	Prompt              text `json:"prompt"`
	MaxTokens           *int `json:"max_tokens"`
	MaxCompletionTokens *int `json:"max_completion_tokens"`
	N                   *int `json:"n"`
	Stream              bool `json:"stream"`
	StreamOptions       struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
}

// A text is the size in tokens of a prompt or of a message's content.
type text int

// UnmarshalJSON takes what OpenAI's API takes for one text: a string, null, token ids, an array of one string, an array
// of parts.
func (t *text) UnmarshalJSON(b []byte) error {
	var one string
	var ids []int
	var list []string
	var parts []struct {
		Text string `json:"text"`
	}
	switch {
	case json.Unmarshal(b, &one) == nil:
	case json.Unmarshal(b, &ids) == nil:
		*t = text(len(ids))
		return nil
	case json.Unmarshal(b, &list) == nil && len(list) == 1:
		one = list[0]
	case json.Unmarshal(b, &parts) == nil:
		for _, p := range parts {
			one += p.Text
		}
	default:
		return errors.New("a text must be a string, an array of token ids, of one string, or of parts")
	}
	*t = text((len(one) + 3) / 4)
	return nil
}

// parse reads and checks a body. Whatever the API, the prompt is in Prompt and the client's limit, if any, in MaxTokens.
// With an error comes its status.
func (s *Server) parse(w http.ResponseWriter, r *http.Request, chat bool) (p params, status int, fail apiError) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return p, http.StatusRequestEntityTooLarge, apiError{Message: fmt.Sprintf("body larger than %d bytes", maxBody)}
	}
	if err == nil {
		err = json.Unmarshal(body, &p)
	}
	if err != nil { // its text may quote the body at length
		return p, http.StatusBadRequest, apiError{Message: fmt.Sprintf("invalid body: %.200s", err)}
	}
	if chat {
		p.Prompt = 0
		for _, m := range p.Messages {
			p.Prompt += m.Content
		}
		p.Prompt = max(p.Prompt, 1) // real templates add to the contents, so that none is empty
	}
	if p.MaxCompletionTokens != nil {
		p.MaxTokens = p.MaxCompletionTokens
	}
	switch {
	case p.Model != "" && p.Model != s.cfg.Model:
		return p, http.StatusNotFound, apiError{Message: "no such model", Param: "model", Code: "model_not_found"}
	case chat && len(p.Messages) == 0:
		fail = apiError{Message: "at least one message is required", Param: "messages"}
	case p.Prompt == 0:
		fail = apiError{Message: "a prompt is required", Param: "prompt"}
	case p.N != nil && *p.N != 1:
		fail = apiError{Message: "n must be 1", Param: "n"}
	case p.MaxTokens != nil && *p.MaxTokens < 1:
		fail = apiError{Message: "max_tokens must be at least 1", Param: "max_tokens"}
	default:
		return p, 0, apiError{}
	}
	return p, http.StatusBadRequest, fail
}

// complete serves both kinds of completions.
func (s *Server) complete(w http.ResponseWriter, r *http.Request) {
	chat := r.URL.Path == "/v1/chat/completions"
	p, status, fail := s.parse(w, r, chat)
	if status != 0 {
		write(w, status, fail)
		return
	}
	prompt := int(p.Prompt)
	output := max(1, min(s.cfg.AnswerTokens, s.core.Capacity()-prompt+1))
	if p.MaxTokens != nil {
		output = *p.MaxTokens
	}
	c := &call{
		id:      r.Header.Get("X-Request-Id"),
		limited: p.MaxTokens != nil || output < s.cfg.AnswerTokens,
		wake:    make(chan struct{}, 1),
	}
	q, number, err := s.add(Request{Prompt: prompt, Output: output, Stream: p.Stream, Tag: c})
	switch {
	case errors.Is(err, errClosed):
		write(w, http.StatusServiceUnavailable, unavailable)
		return
	case err != nil:
		write(w, http.StatusBadRequest, apiError{
			Message: fmt.Sprintf("the maximum context length is %d tokens, the request has %d and may generate %d",
				s.core.Capacity(), prompt, output),
			Param: "max_tokens", Code: "context_length_exceeded",
		})
		return
	}

	id := c.id
	if id == "" {
		id = fmt.Sprint(number)
	}
	a := answer{completion: completion{
		ID: fmt.Sprintf("cmpl-%.128s", id), Object: "text_completion", Created: time.Now().Unix(), Model: s.cfg.Model,
	}}
	if chat {
		a.chat, a.ID, a.Object = true, "chat"+a.ID, "chat.completion"
	}
	if p.Stream {
		s.stream(w, r, q, a, p.StreamOptions.IncludeUsage)
	} else {
		s.whole(w, r, q, a)
	}
}

// await waits for news of a sequence and returns how far it is. It is false if the client has left, whose sequence is
// aborted then.
func (s *Server) await(r *http.Request, q *Sequence) (generated int, state State, ok bool) {
	select {
	case <-q.Tag.(*call).wake:
		generated, state = s.progress(q)
		return generated, state, true
	case <-r.Context().Done():
		s.cancel(q)
		return 0, 0, false
	}
}

// whole answers in one piece.
func (s *Server) whole(w http.ResponseWriter, r *http.Request, q *Sequence, a answer) {
	n, state, ok := s.await(r, q) // woken only at the end
	switch {
	case !ok:
	case state == Aborted:
		write(w, http.StatusServiceUnavailable, unavailable)
	default:
		var b strings.Builder
		for i := range n {
			b.WriteString(word(i))
		}
		write(w, http.StatusOK, a.with(b.String(), new(q.reason())).and(q))
	}
}

// stream answers with server-sent events, one for each token.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, q *Sequence, a answer, withUsage bool) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	w.Header().Set("Cache-Control", "no-cache")
	w.WriteHeader(http.StatusOK)
	a.streamed = true
	if a.chat {
		a.Object = "chat.completion.chunk"
	}
	flush := http.NewResponseController(w).Flush
	err := flush()
	for sent := 0; err == nil; {
		n, state, ok := s.await(r, q)
		switch {
		case !ok:
			return
		case state == Aborted:
			panic(http.ErrAbortHandler) // the engine was closed: break the stream off, a normal end would look like an answer
		}
		if a.chat && sent == 0 {
			first := a.completion
			first.Choices = []choice{{Delta: &message{Role: "assistant"}}}
			err = event(w, first)
		}
		for ; sent < n && err == nil; sent++ {
			var reason *string
			if state == Finished && sent == n-1 {
				reason = new(q.reason())
			}
			err = event(w, a.with(word(sent), reason))
		}
		if state == Finished {
			if withUsage && err == nil {
				a.Choices = []choice{}
				err = event(w, a.and(q))
			}
			if err == nil {
				io.WriteString(w, "data: [DONE]\n\n")
			}
			return
		}
		if err == nil {
			err = flush()
		}
	}
	s.cancel(q) // nobody reads any more
}

// event writes one server-sent event.
func event(w io.Writer, c completion) error {
	b, err := json.Marshal(c)
	if err == nil {
		_, err = fmt.Fprintf(w, "data: %s\n\n", b)
	}
	return err
}

type completion struct {
	ID      string   `json:"id"`
	Object  string   `json:"object"`
	Created int64    `json:"created"`
	Model   string   `json:"model"`
	Choices []choice `json:"choices"`
	Usage   *usage   `json:"usage,omitempty"`
}

type choice struct {
	Index        int      `json:"index"`
	Text         *string  `json:"text,omitempty"`
	Message      *message `json:"message,omitempty"`
	Delta        *message `json:"delta,omitempty"`
	FinishReason *string  `json:"finish_reason"`
}

type message struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content"`
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
}

// An answer is the constant part of a completion and the form of the rest.
type answer struct {
	completion
	chat, streamed bool
}

// with returns the completion that says text.
func (a answer) with(text string, reason *string) completion {
	c := choice{FinishReason: reason}
	switch {
	case !a.chat:
		c.Text = &text
	case a.streamed:
		c.Delta = &message{Content: text}
	default:
		c.Message = &message{Role: "assistant", Content: text}
	}
	a.Choices = []choice{c}
	return a.completion
}

// and returns the completion with the usage of q, which has ended.
func (c completion) and(q *Sequence) completion {
	c.Usage = &usage{q.Prompt, q.Generated, q.Prompt + q.Generated}
	return c
}

// word returns token i of every answer.
func word(i int) string {
	const words = "ash bay cup dew elm fog gem hay ivy jar key log map nut oak pea ray sea tin urn van wax yew zoo "
	i = i * 4 % len(words)
	return words[i : i+4]
}

// An apiError is an error as OpenAI's API words it. Param and Code are strings or nil.
type apiError struct {
	Message string `json:"message"`
	Type    string `json:"type"`
	Param   any    `json:"param"`
	Code    any    `json:"code"`
}

var unavailable = apiError{Message: "the engine is closed", Type: "server_error"}

// write answers with v as JSON, an apiError in its envelope.
func write(w http.ResponseWriter, status int, v any) {
	if e, ok := v.(apiError); ok {
		if e.Type == "" {
			e.Type = "invalid_request_error"
		}
		v = map[string]apiError{"error": e}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v) // fails only if the client has left
}
